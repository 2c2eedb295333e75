"""A real server with the models of the check, in one folder, and clients of it."""

from __future__ import annotations

import contextlib
import functools
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import tritonclient.grpc as grpcclient

import shm_backend_utils
from shm_backend_utils.cli.common.server import REPOSITORY, copy_models, models_in, temporary_server
from shm_backend_utils.client import PoolOptions, ShmClient
from shm_backend_utils.server import EmbeddedServer, Installation

from ... import ROOT
from ..gpu import Gpu
from ..report import Amounts, Figure, ratio

_EMPTY: Final = ROOT / "scripts" / "tools" / "bench" / "models" / "empty"
"""A model that does nothing, without this library."""
_GPU_CHECK: Final = Path(__file__).resolve().parents[1]
_PACKAGE: Final = Path(shm_backend_utils.__file__).parent
_STAND_IN: Final = Path(__file__).with_name("stand_in.py")
_WORKS: Final[Mapping[str, Mapping[str, str]]] = {
    "quick": {"WORK": "quick", "STREAM": "named"},
    "quick_by_event": {"WORK": "quick", "STREAM": "named", "SHM_GPU_EVENTS": "true"},
    "late": {"WORK": "late", "STREAM": "unnamed"},
}
_PASSED_ON: Final = {"LIBRARY": "neither", "WORK": "none", "STREAM": "unnamed"}


def _write_repository(folder: Path, *, libraries: Sequence[str], is_fake: bool) -> Path:
    """Write the models to a folder, each with this package, which need not be installed then; return the folder."""
    samples = [REPOSITORY / name for name in ("gpu_multiply", "gpu_normalize") if "cupy" in libraries]
    copy_models([*samples, *models_in(_GPU_CHECK / "models"), _EMPTY], folder)
    for library in libraries:
        for work, parameters in _WORKS.items():
            _copy_as(folder, _name_of(work, library), "FP32", {"LIBRARY": library, **parameters})
    for name in ("FP32", "BF16", "BOOL"):
        _copy_as(folder, f"gpu_identity_{name.lower()}", name, _PASSED_ON)
    shutil.rmtree(folder / "gpu_work")
    for model in models_in(folder):
        _add_code(model, is_fake=is_fake)
    return folder


def _copy_as(folder: Path, name: str, data_type: str, parameters: Mapping[str, str]) -> None:
    """Copy ``gpu_work`` under another name, with another type in its configuration, and parameters."""
    shutil.copytree(folder / "gpu_work", folder / name)
    config = folder / name / "config.pbtxt"
    text = config.read_text().replace("TYPE_FP32", f"TYPE_{data_type}")
    lines = [f'parameters {{ key: "{key}" value: {{ string_value: "{value}" }} }}' for key, value in parameters.items()]
    config.write_text("\n".join([text, *lines, ""]))


def _add_code(model: Path, *, is_fake: bool) -> None:
    """Put this package beside a model's code, and a fake GPU if the model needs one that is not there."""
    home, config = model / "1", model / "config.pbtxt"
    package = home / _GPU_CHECK.relative_to(ROOT)  # where the model imports it from
    shutil.copytree(_PACKAGE, home / _PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
    package.mkdir(parents=True)
    shutil.copy(_GPU_CHECK / "kernels.py", package)
    if is_fake and "KIND_GPU" in config.read_text():
        config.write_text(config.read_text().replace("KIND_GPU", "KIND_CPU"))
        (home / "model.py").rename(home / "replaced_model.py")
        shutil.copy(_STAND_IN, home / "model.py")
        shutil.copy(_GPU_CHECK / "fakes.py", package)


def _name_of(work: str, library: str) -> str:
    return f"gpu_{work}_{library}"


@dataclass(frozen=True)
class ServerClient:
    gpu: Gpu  # this process', with one library
    shm: ShmClient
    bare: Any
    server: EmbeddedServer
    # closed when the server has ended. What is registered there by its handle is freed then, as Triton unmaps some time
    # after it has been told to
    after_server: contextlib.ExitStack

    def model(self, work: str) -> str:
        return _name_of(work, self.gpu.kernels.name)

    def infer_nothing(self) -> None:
        self.bare.infer(_EMPTY.name, [])


Measure = Callable[[ServerClient, Amounts], list[Figure]]
ServerCheck = Callable[[ServerClient], str | None]
"""Returns a detail for the report, or none; raises what the report understands."""


def over_empty(what: str, medians: Mapping[str, float], **limits: Any) -> list[Figure]:
    return [
        ratio(f"{what} of {name}", median, medians["empty"], "× an empty request", **limits)
        for name, median in medians.items()
        if name != "empty"
    ]


@contextlib.contextmanager
def clients_of(gpus: Sequence[Gpu], installation: Installation) -> Iterator[list[ServerClient]]:
    """Run a server for a block, with models that work by the libraries of all these, and make a client with each."""
    libraries = [gpu.kernels.name for gpu in gpus]
    models = functools.partial(_write_repository, libraries=libraries, is_fake=gpus[0].is_fake)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(temporary_server("gpu-check", models, installation=installation, numpy="own"))
        after_server = stack.enter_context(contextlib.ExitStack())
        bare = stack.enter_context(grpcclient.InferenceServerClient(server.grpc_url))
        pool = PoolOptions(lend_bytes=2**20)  # the checks' own tensors are used in place, which are small
        shm = [stack.enter_context(ShmClient(server.grpc_url, cuda=gpu.access, pool=pool)) for gpu in gpus]
        yield [ServerClient(gpu, each, bare, server, after_server) for gpu, each in zip(gpus, shm, strict=True)]
        server.stop()  # no model has the clients' memory mapped then: they free it when they are closed
