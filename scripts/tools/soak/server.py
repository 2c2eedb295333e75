"""The soak's server: it comes back on the same ports, and its models' stubs can be found."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shlex
import shutil
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from shm_backend_utils.cli.common.server import REPOSITORY, copy_models, models_in
from shm_backend_utils.errors import ClosedError, MachineError
from shm_backend_utils.memory.managed import KEY_PREFIX
from shm_backend_utils.memory.registrations import Registration, fetch_registrations
from shm_backend_utils.memory.shared_file import DEV_SHM
from shm_backend_utils.server import EmbeddedServer, Installation, install
from shm_backend_utils.testing.faults.at_hand import free_ports

from ..processes import children, command_line
from .client.process import Tally
from .machine import held_sealed_memory, held_shared_memory

OWN_MODELS: Final = Path(__file__).resolve().parent / "models"
SAMPLE_MODELS: Final = ("identity", "multiply", "frames", "text_upper")
START_ATTEMPTS: Final = 3
RELOAD_S: Final = 30.0
LOG_LINES: Final = 60
# Models are loaded and unloaded when they are told to be, and get the headers that the soak sends as parameters.
OPTIONS: Final = (
    "--model-control-mode=explicit",
    "--load-model=*",
    "--http-header-forward-pattern=(?i)soak-.*",
    "--grpc-header-forward-pattern=(?i)soak-.*",
)
GUESTS: Final = "guests"
"""The name of a model like ``halves`` that takes another user's memory, too."""
ALLOWED_UID: Final = 20_001
DISALLOWED_UID: Final = 20_002


class SoakServer:
    """An embedded server that is killed and started again."""

    def __init__(self, folder: Path, tally: Tally) -> None:
        self._folder = folder
        self._tally = tally
        self._prefixes: list[str] = []
        self._models = folder / "models"
        copy_models([*models_in(OWN_MODELS), *(REPOSITORY / name for name in SAMPLE_MODELS)], self._models)
        _add_model_of_guests(self._models)
        self._installation = _installation_with(OPTIONS, folder / "installation")
        self._changes = itertools.count(1)
        self._ports = free_ports()
        self._server = self._start()
        self._instances = {name: len(self.stubs(name)) for name in self.models}
        self.grpc_url = self._server.grpc_url  # as for ShmClient; the same for every start
        self.http_url = f"http://{self._server.http_url}"

    @property
    def is_running(self) -> bool:
        """Whether it has not exited."""
        try:
            return self.pid > 0
        except ClosedError:
            return False

    @property
    def pid(self) -> int:
        """Of the tritonserver."""
        return self._server.pid

    def stubs(self, model: str = "") -> list[int]:
        """Return the processes that execute a model, or any model."""
        word = f"/models/{model}/" if model else "/models/"
        try:
            return [pid for pid in children(self.pid) if word in command_line(pid)]
        except ClosedError:
            return []

    @property
    def models(self) -> list[str]:
        """Names of all models."""
        return [model.name for model in models_in(self._models)]

    def missing_stubs(self) -> list[str]:
        """Return the models with fewer processes than when the server had started, once for each."""
        return [name for name, count in self._instances.items() for _ in range(count - len(self.stubs(name))) if count]

    def reload(self, model: str) -> bool:
        """Have a model loaded anew, as if its code had changed; return whether it is ready with all its processes."""
        before = set(self.stubs(model))
        os.utime(self._models / model / "1" / "model.py", (next(self._changes),) * 2)
        request = urllib.request.Request(f"{self.http_url}/v2/repository/models/{model}/load", b"{}")
        try:
            with _WITHOUT_PROXY.open(request, timeout=RELOAD_S):
                pass
        except urllib.error.HTTPError as error:
            self._tally.add("reloads that failed", error.read(200).decode(errors="replace"))
            return False
        except OSError as error:
            self._tally.add("reloads that failed", str(error))
            return False
        deadline = time.monotonic() + RELOAD_S
        while time.monotonic() < deadline:
            now = set(self.stubs(model))
            if len(now) == self._instances[model] and not now & before:
                return True
            time.sleep(0.05)
        return False

    def registrations(self) -> dict[str, Registration]:
        """Return what is registered as system shared memory, by name."""
        return fetch_registrations(self.http_url)

    def restart(self) -> None:
        """Kill it and start it again."""
        self.kill()
        self._server = self._start()

    def kill(self) -> None:
        """Kill it, and count what its log tells.

        A server that was asked to stop would wait for its own timeout, half a minute, once a stub of it was killed.
        """
        with contextlib.suppress(ClosedError, ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
            self._server.wait()
        self._server.stop()
        log = self._server.log_file.read_text(errors="replace")
        for reason in re.findall(r"soak refused: ([^\"\n]*)", log):
            self._tally.add("refused by the model", reason)

    def held_by_stubs(self) -> list[str]:
        """Return what the stubs hold of clients' regions. A model's own, which it lends to others, are no clients'."""
        stubs = self.stubs()
        sealed = [f"{command_line(pid)}: {held}" for pid in stubs for held in held_sealed_memory(pid)]
        return sealed + [
            f"{command_line(pid)}: {held}"
            for pid in stubs
            for held in held_shared_memory(pid, KEY_PREFIX)
            if not any(f"{KEY_PREFIX}{owner}-" in held for owner in stubs)
        ]

    def left_behind(self) -> list[str]:
        """Return the shared memory of the Python backend that outlived its server."""
        return [path.name for prefix in self._prefixes for path in DEV_SHM.glob(f"{prefix}*")]

    def log_tail(self) -> str:
        """Return the end of its log."""
        return self._server.log_tail(LOG_LINES)

    def _start(self) -> EmbeddedServer:
        for attempt in range(1, START_ATTEMPTS + 1):
            try:
                server = EmbeddedServer.start(
                    self._models,
                    ports=self._ports,
                    installation=self._installation,
                    log_file=self._folder / "server.log",
                    numpy="own",  # the harder one for the library
                )
            except MachineError as error:
                if attempt == START_ATTEMPTS:
                    raise
                self._tally.add_error(error, "server starts that failed")
            else:
                self._prefixes.append(server.shm_prefix)
                return server
        raise AssertionError("unreachable")


_WITHOUT_PROXY: Final = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def _add_model_of_guests(models: Path) -> None:
    shutil.copytree(models / "halves", models / GUESTS)
    with (models / GUESTS / "config.pbtxt").open("a") as config:
        uids = f"{os.geteuid()},{ALLOWED_UID}"
        config.write(f'parameters {{ key: "SHM_ALLOWED_UIDS" value: {{ string_value: "{uids}" }} }}\n')


def _installation_with(options: Sequence[str], folder: Path) -> Installation:
    """Return an installation in a new folder whose server gets these options beside those that it is given."""
    real = install()
    wrapped = Installation(folder, real.triton)
    wrapped.binary.parent.mkdir(parents=True)
    wrapped.libraries.symlink_to(real.libraries)
    wrapped.backends.symlink_to(real.backends)
    wrapped.binary.write_text(f'#!/bin/sh\nexec {shlex.quote(str(real.binary))} "$@" {shlex.join(options)}\n')
    wrapped.binary.chmod(0o755)
    return wrapped
