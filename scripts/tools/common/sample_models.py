"""The sample models that this machine can run, and how models get into a server's folder."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from shm_backend_utils.errors import MachineError
from shm_backend_utils.memory.cuda.access import CudaAccess

from .. import ROOT

__all__ = ["REPOSITORY", "copy_models", "copy_sample_models", "models_in", "sample_models"]

REPOSITORY: Final = ROOT / "model_repository"
_DEVICE_FILES: Final = ("/dev/nvidiactl", "/dev/dxg")  # of NVIDIA's kernel driver; of WSL2


def models_in(repository: Path) -> list[Path]:
    """Return the folders of all models in a folder."""
    return [config.parent for config in sorted(repository.glob("*/config.pbtxt"))]


def sample_models() -> list[Path]:
    """Return the folders of the sample models; those of KIND_GPU only where a GPU, cuda-bindings and CuPy are.

    A server does not start with a model that refuses to load.
    """
    models = models_in(REPOSITORY)
    if any(_needs_gpu(model) for model in models) and not _has_gpu():
        models = [model for model in models if not _needs_gpu(model)]
    return models


def copy_models(models: Iterable[Path], folder: Path) -> Path:
    """Copy models into a folder, and return it."""
    for model in models:
        shutil.copytree(model, folder / model.name, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    return folder


def copy_sample_models(folder: Path) -> Path:
    """Copy the sample models into a folder, and return it."""
    return copy_models(sample_models(), folder)


def _needs_gpu(model: Path) -> bool:
    return "kind: KIND_GPU" in (model / "config.pbtxt").read_text()


def _has_gpu() -> bool:
    """Return whether a server would see a GPU: this process may have a driver that is none."""
    if importlib.util.find_spec("cupy") is None or not any(Path(file).exists() for file in _DEVICE_FILES):
        return False
    try:
        return CudaAccess().runtime.device_count() > 0
    except MachineError:
        return False
