"""A server that loads models when it is told to, and what is to be loaded."""

from __future__ import annotations

import inspect
import itertools
import os
import re
import shutil
import signal
import sys
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NamedTuple

import tritonclient.grpc

from shm_backend_utils.server import EmbeddedServer

from ..crash.servers import installation_with

MODELS: Final = Path(__file__).resolve().parents[1] / "models"
OURS: Final = tuple(f"{Path(__file__).resolve().parents[2] / folder}/" for folder in ("tests", "scripts"))
PREFIX: Final = "shm_backend_utils_"
SAMPLE: Final = re.compile(rf"{PREFIX}(\w+)\{{(.*)\}} (\S+)")
STRING: Final = re.compile(r'"[^"\n]*"')
LABEL: Final = re.compile(r'(\w+)="([^"]*)"')


class Sample(NamedTuple):
    """One line of what the metrics port says of this library."""

    name: str
    labels: dict[str, str]
    value: float


class LoadingServer:
    """The server, and models that it may load."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.models = folder / "models"
        self.models.mkdir()
        installation = installation_with(["--model-control-mode=explicit", *options], folder / "installation")
        self.server = EmbeddedServer.start(
            self.models, installation=installation, log_file=folder / "server.log", numpy="own"
        )
        self.grpc: Any = tritonclient.grpc.InferenceServerClient(self.server.grpc_url)
        self._changes = itertools.count(1)

    def copy(self, name: str, like: str) -> None:
        """Have one of the test models under a name, to be loaded."""
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(MODELS / like, self.models / name, ignore=ignored, dirs_exist_ok=True)

    def load(self, name: str, like: str, config: str | None) -> None:
        """Load one of the test models under a name, with this config.pbtxt or with none."""
        self.copy(name, like)
        if config is not None:
            (self.models / name / "config.pbtxt").write_text(config)
        self.grpc.load_model(name)

    def load_all(self, like: str, configs: Mapping[str, str | None]) -> None:
        """Load models side by side, as each load is spent in waiting."""
        side_by_side(lambda name: self.load(name, like, configs[name]), configs)

    def load_anew(self, name: str) -> None:
        """Load a loaded model once more, as if its code had changed."""
        os.utime(self.models / name / "1" / "model.py", (next(self._changes),) * 2)
        self.grpc.load_model(name)

    def samples(self, model: str) -> list[Sample]:
        with urllib.request.urlopen(f"http://{self.server.metrics_url}/metrics", timeout=30) as reply:
            found = SAMPLE.findall(reply.read().decode())
        samples = [Sample(name, dict(LABEL.findall(labels)), float(value)) for name, labels, value in found]
        return [sample for sample in samples if sample.labels["model"] == model]

    def __enter__(self) -> LoadingServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.grpc.close()
        os.kill(self.server.pid, signal.SIGKILL)  # with a dead stub, it would take seconds to stop
        self.server.stop()


def side_by_side(do: Callable[[str], None], models: Iterable[str]) -> None:
    """Do something with models, as each load is spent in waiting."""
    with ThreadPoolExecutor() as executor:
        list(executor.map(do, models))


def models_named_by(tests: ModuleType, repository: Path) -> Set[str]:
    """Return the models whose names a module has in strings, or modules of ours that it imports; or such models."""
    seen: set[ModuleType] = set()
    left = [tests]
    while left:
        module = left.pop()
        if module not in seen and (getattr(module, "__file__", None) or "").startswith(OURS):
            seen.add(module)
            homes = {getattr(value, "__module__", None) for value in vars(module).values()}
            left += [sys.modules[home] for home in homes if home in sys.modules]
            left += [value for value in vars(module).values() if isinstance(value, ModuleType)]
    models = {model.name for model in repository.iterdir()}
    found = models & words_in_strings(map(inspect.getsource, seen))
    programs = [repository / name / "1" / "model.py" for name in found]
    return found | (models & words_in_strings(each.read_text() for each in programs if each.exists()))


def words_in_strings(programs: Iterable[str]) -> Set[str]:
    return {word for program in programs for text in STRING.findall(program) for word in re.findall(r"\w+", text)}
