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
from shm_backend_utils.client import ShmClient
from shm_backend_utils.server import EmbeddedServer, Installation

from ... import ROOT
from ..gpu import Gpu

_GPU_CHECK: Final = Path(__file__).resolve().parents[1]
_OWN_MODELS: Final = _GPU_CHECK / "models"
_PACKAGE: Final = Path(shm_backend_utils.__file__).parent
_OF_CUPY: Final = ("gpu_multiply", "gpu_normalize")
_STAND_IN: Final = Path(__file__).with_name("stand_in.py")
_WORK: Final = "gpu_work"
_WORKS: Final[Mapping[str, Mapping[str, str]]] = {
    "quick": {"WORK": "quick", "STREAM": "named"},
    "quick_by_event": {"WORK": "quick", "STREAM": "named", "SHM_GPU_EVENTS": "true"},
    "late": {"WORK": "late", "STREAM": "unnamed"},
}
_IDENTITY: Final = "gpu_identity"
_FURTHER_TYPES: Final = ("BF16", "BOOL")


def work_model(work: str, library: str) -> str:
    """Return the name of the model that does some work by a library."""
    return f"gpu_{work}_{library}"


def write_repository(folder: Path, *, libraries: Sequence[str], is_fake: bool) -> Path:
    """Write the models to a folder, each with this package, which need not be installed then; return the folder.

    If there is no GPU, those that need one get a fake one.
    """
    samples = _OF_CUPY if "cupy" in libraries else ()
    copy_models([*(REPOSITORY / name for name in samples), *models_in(_OWN_MODELS)], folder)
    for library in libraries:
        for work, parameters in _WORKS.items():
            _copy_as(folder, _WORK, work_model(work, library), {}, {"LIBRARY": library, **parameters})
    shutil.rmtree(folder / _WORK)
    for name in _FURTHER_TYPES:
        _copy_as(folder, _IDENTITY, f"{_IDENTITY}_{name.lower()}", {"TYPE_FP32": f"TYPE_{name}"}, {})
    for model in models_in(folder):
        home = model / "1"
        shutil.copytree(_PACKAGE, home / _PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
        package = home / _GPU_CHECK.relative_to(ROOT)  # where the model imports it from
        package.mkdir(parents=True)
        shutil.copy(_GPU_CHECK / "kernels.py", package)
        if is_fake and "KIND_GPU" in (model / "config.pbtxt").read_text():
            _replace_gpu(model, package)
    return folder


def _copy_as(folder: Path, model: str, name: str, replaced: Mapping[str, str], parameters: Mapping[str, str]) -> None:
    """Copy a model under another name, with other words in its configuration, and more parameters."""
    shutil.copytree(folder / model, folder / name)
    config = folder / name / "config.pbtxt"
    text = config.read_text()
    for word, other in replaced.items():
        text = text.replace(word, other)
    lines = [f'parameters {{ key: "{key}" value: {{ string_value: "{value}" }} }}' for key, value in parameters.items()]
    config.write_text("\n".join([text, *lines, ""]))


def _replace_gpu(model: Path, package: Path) -> None:
    config, home = model / "config.pbtxt", model / "1"
    config.write_text(config.read_text().replace("KIND_GPU", "KIND_CPU"))
    (home / "model.py").rename(home / "replaced_model.py")
    shutil.copy(_STAND_IN, home / "model.py")
    shutil.copytree(_GPU_CHECK / "fakes", package / "fakes", ignore=shutil.ignore_patterns("__pycache__"))


@dataclass(frozen=True)
class ServerClient:
    """Calls of the check."""

    gpu: Gpu  # this process', with one library
    shm: ShmClient
    bare: Any
    # closed when the server has ended. What is registered there by its handle is freed then, as Triton unmaps some time
    # after it has been told to
    after_server: contextlib.ExitStack

    def model(self, work: str) -> str:
        """Return the name of the model that does this work by this client's library."""
        return work_model(work, self.gpu.kernels.name)

    def infer_nothing(self) -> None:
        """Make an empty request, to a model without this library."""
        self.bare.infer("gpu_empty", [])

    def server_version(self) -> str:
        """Return what the server says."""
        version: str = self.bare.get_server_metadata().version
        return version


ServerCheck = Callable[[ServerClient], str]
"""Returns a detail for the report; raises what the report understands."""


@contextlib.contextmanager
def running_server(gpus: Sequence[Gpu], installation: Installation) -> Iterator[EmbeddedServer]:
    """Run a server as long as the block, with models that work by the libraries of all these."""
    libraries = [gpu.kernels.name for gpu in gpus]
    models = functools.partial(write_repository, libraries=libraries, is_fake=gpus[0].is_fake)
    with temporary_server("gpu-check", models, installation=installation, numpy="own") as server:
        yield server


@contextlib.contextmanager
def clients_of(server: EmbeddedServer, gpus: Sequence[Gpu]) -> Iterator[list[ServerClient]]:
    """Make a client with each of these; stop the server in the end."""
    with contextlib.ExitStack() as stack:
        after_server = stack.enter_context(contextlib.ExitStack())
        bare = stack.enter_context(grpcclient.InferenceServerClient(server.grpc_url))
        shm = [stack.enter_context(ShmClient(server.grpc_url, cuda=gpu.access)) for gpu in gpus]
        yield [ServerClient(gpu, each, bare, after_server) for gpu, each in zip(gpus, shm, strict=True)]
        server.stop()  # no model has the clients' memory mapped then: they free it when they are closed
