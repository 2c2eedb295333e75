"""The soak's server: it restarts on the same ports, and its models' processes can be found and reloaded."""

from __future__ import annotations

import itertools
import os
import shlex
import shutil
import signal
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import Final

import tritonclient.http
from tritonclient.utils import InferenceServerException

from shm_backend_utils.cli.common.server import REPOSITORY, copy_models, models_in
from shm_backend_utils.errors import ClosedError
from shm_backend_utils.memory.managed import KEY_PREFIX
from shm_backend_utils.server import Installation, install
from shm_backend_utils.testing.faults.at_hand import MortalServer

from ..processes import children, command_line
from .client.process import held_memory
from .client.tally import Tally

RELOAD_S: Final = 30.0
GUESTS: Final = "guests"
"""The name of a model like ``halves`` that takes another user's memory, too."""
ALLOWED_UID: Final = 20_001


class SoakServer(MortalServer):
    def __init__(self, folder: Path, tally: Tally) -> None:
        self._tally = tally
        self._folder = folder / "models"
        samples = [REPOSITORY / name for name in ("identity", "multiply", "frames", "text_upper")]
        copy_models([*models_in(Path(__file__).with_name("models")), *samples], self._folder)
        shutil.copytree(self._folder / "halves", self._folder / GUESTS)
        with (self._folder / GUESTS / "config.pbtxt").open("a") as config:
            uids = f"{os.geteuid()},{ALLOWED_UID}"
            config.write(f'parameters {{ key: "SHM_ALLOWED_UIDS" value: {{ string_value: "{uids}" }} }}\n')
        self.models = [model.name for model in models_in(self._folder)]
        self._changes = itertools.count(1)
        super().__init__(
            self._folder,
            installation=_installation(folder / "installation"),
            log_file=folder / "server.log",
            numpy="own",  # the harder one for the library
        )
        self._instances = {name: len(self.stubs(name)) for name in self.models}
        self.urls = (self.server.grpc_url, f"http://{self.server.http_url}")  # the same for every start

    @property
    def is_running(self) -> bool:
        try:
            return self.server.pid > 0
        except ClosedError:
            return False

    def stubs(self, model: str = "") -> list[int]:
        word = f"/models/{model}/" if model else "/models/"
        try:
            return [pid for pid in children(self.server.pid) if word in command_line(pid)]
        except ClosedError:
            return []

    def missing_stubs(self) -> list[str]:
        """Return the models' names, once for each process that is gone since the server started."""
        return [name for name, count in self._instances.items() for _ in range(count - len(self.stubs(name)))]

    def reload(self, model: str) -> bool:
        """Reload a model, as if its code had changed; return whether it is ready with all its processes."""
        before = set(self.stubs(model))
        os.utime(self._folder / model / "1" / "model.py", (next(self._changes),) * 2)
        try:
            client = tritonclient.http.InferenceServerClient(self.server.http_url, network_timeout=RELOAD_S)
            with closing(client):
                client.load_model(model)
        except (InferenceServerException, OSError) as error:
            self._tally.add_error(error, "reloads that failed")
            return False
        deadline = time.monotonic() + RELOAD_S
        while time.monotonic() < deadline:
            now = set(self.stubs(model))
            if len(now) == self._instances[model] and not now & before:
                return True
            time.sleep(0.05)
        return False

    def heal(self) -> list[str]:
        """Bring back every process that has died; return whose. Triton 2.51 never starts a model's again by itself."""
        if not self.is_running:
            self.restart()
            return ["the server"]
        dead = self.missing_stubs()
        for model in dict.fromkeys(dead):
            if not self.reload(model):
                self._tally.add("faults", "server killed, because a dead model could not be loaded anew")
                self.restart()
                break
            self._tally.add("faults", "model reloaded, because its process had died")
        return dead

    def restart(self) -> None:
        self.kill()
        self.come_back()

    def kill(self) -> None:
        """Kill the server, and all that it has started; it may have died just now."""
        with suppress(ClosedError, ProcessLookupError):
            os.kill(self.server.pid, signal.SIGKILL)
        self.server.stop()

    def held_by_stubs(self) -> list[str]:
        """Return what the stubs hold of clients' regions. A model's own, which it lends to others, are no clients'."""
        stubs = self.stubs()
        own = [f"{KEY_PREFIX}{pid}-" for pid in stubs]
        held = [f"{command_line(pid)}: {each}" for pid in stubs for each in held_memory(pid)]
        return [each for each in held if not any(prefix in each for prefix in own)]


def _installation(folder: Path) -> Installation:
    """Return one whose server loads models as it is told to, and hands the soak's headers to them as parameters."""
    headers = [f"--{protocol}-header-forward-pattern=(?i)soak-.*" for protocol in ("http", "grpc")]
    options = ["--model-control-mode=explicit", "--load-model=*", *headers]
    real = install()
    wrapped = Installation(folder, real.triton)
    wrapped.binary.parent.mkdir(parents=True)
    wrapped.libraries.symlink_to(real.libraries)
    wrapped.backends.symlink_to(real.backends)
    wrapped.binary.write_text(f'#!/bin/sh\nexec {shlex.quote(str(real.binary))} "$@" {shlex.join(options)}\n')
    wrapped.binary.chmod(0o755)
    return wrapped
