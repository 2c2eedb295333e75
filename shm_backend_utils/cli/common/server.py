"""The sample models that this machine can run, and a server that lasts as long as a block."""

from __future__ import annotations

import importlib.util
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from ...errors import MachineError
from ...gpu.memory.access import CudaAccess
from ...repository.files import CONFIG_FILE
from ...server import EmbeddedServer, Installation, Ports, StubNumpy
from ..terminal import undisturbed

__all__ = ["REPOSITORY", "copy_models", "copy_sample_models", "models_in", "temporary_server"]

_CHECKOUT: Final = Path(__file__).resolve().parents[3] / "model_repository"
_INSTALLED: Final = Path(__file__).resolve().parents[1] / "model_repository"  # where a wheel has it
REPOSITORY: Final = _INSTALLED if _INSTALLED.is_dir() else _CHECKOUT
_PACKAGES: Final = {"image_resize_normalize": "cv2"}  # of models that need more than NumPy
_OTHER_FOLDER: Final = "make room there, or set TMPDIR to a folder that has some"
_DEVICE_FILES: Final = ("/dev/nvidiactl", "/dev/dxg")  # of NVIDIA's kernel driver; of WSL2


def models_in(repository: Path) -> list[Path]:
    """Return the folders of all models in a folder."""
    return [config.parent for config in sorted(repository.glob(f"*/{CONFIG_FILE}"))]


def sample_models() -> list[Path]:
    """Return the folders of the sample models that can load here: a server does not start if a model fails to load."""
    models = [model for model in models_in(REPOSITORY) if _has_package(model)]
    of_gpus = [model for model in models if "kind: KIND_GPU" in (model / CONFIG_FILE).read_text()]
    return [model for model in models if model not in of_gpus] if of_gpus and not _has_gpu() else models


def copy_models(models: Iterable[Path], folder: Path) -> Path:
    """Copy models into a folder, and return it; MachineError without room or permission."""
    try:
        for model in models:
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(model, folder / model.name, ignore=ignored, dirs_exist_ok=True)
    except OSError as error:
        raise MachineError(f"models cannot be copied to {folder}: {_reason(error)}; {_OTHER_FOLDER}") from None
    return folder


def _reason(error: OSError) -> str:
    """Return the reason of an error; one of ``copytree`` lists all files that failed, each with its reason."""
    if isinstance(error, shutil.Error):
        return str(error.args[0][0][-1])
    return error.strerror or str(error)


def copy_sample_models(folder: Path) -> Path:
    """Copy the sample models into a folder, and return it."""
    return copy_models(sample_models(), folder)


def _has_package(model: Path) -> bool:
    package = _PACKAGES.get(model.name)
    is_there = package is None or importlib.util.find_spec(package) is not None
    if not is_there:
        print(f"the model {model.name} is left out, as {package} is not installed", file=sys.stderr)
    return is_there


def _has_gpu() -> bool:
    """Return whether a server would see a GPU; without device files, a driver in this process is a fake one."""
    if importlib.util.find_spec("cupy") is None or not any(Path(file).exists() for file in _DEVICE_FILES):
        return False
    try:
        return CudaAccess().runtime.device_count() > 0
    except MachineError:
        return False


@contextmanager
def temporary_server(
    tool: str,
    provide_models: Callable[[Path], Path] = copy_sample_models,
    *,
    ports: Ports | None = None,
    installation: Installation | None = None,
    numpy: StubNumpy = "server",
) -> Iterator[EmbeddedServer]:
    """Start a server in a temporary folder named after the tool, with the models that ``provide_models`` returns."""
    with _temporary_folder(tool) as name:
        folder = Path(name)
        models = provide_models(folder / "models")
        log_file = folder / "server.log"
        server = EmbeddedServer.start(models, ports=ports, installation=installation, log_file=log_file, numpy=numpy)
        try:
            yield server
        finally:
            with undisturbed():
                server.stop()


@contextmanager
def _temporary_folder(tool: str) -> Iterator[str]:
    try:
        folder = tempfile.mkdtemp(prefix=f"shm-backend-utils-{tool}-")
    except OSError as error:
        raise MachineError(f"cannot create a temporary folder: {error.strerror or error}; {_OTHER_FOLDER}") from None
    try:
        yield folder
    finally:
        with undisturbed():
            shutil.rmtree(folder)
