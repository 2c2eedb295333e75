"""The sample models that this machine can run."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

from shm_backend_utils.errors import MachineError
from shm_backend_utils.memory.cuda.memory import CudaAccess

__all__ = ["REPOSITORY", "copy_sample_models", "sample_models"]

REPOSITORY: Final = Path(__file__).resolve().parents[2] / "model_repository"


def sample_models() -> list[Path]:
    """Return the folders of the sample models; those of KIND_GPU only where a GPU and CuPy are.

    A server does not start with a model that refuses to load.
    """
    configs = sorted(REPOSITORY.glob("*/config.pbtxt"))
    if any(_needs_gpu(config) for config in configs) and not _has_gpu():
        configs = [config for config in configs if not _needs_gpu(config)]
    return [config.parent for config in configs]


def copy_sample_models(folder: Path) -> Path:
    """Copy these models into a folder, and return it."""
    for model in sample_models():
        shutil.copytree(model, folder / model.name, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    return folder


def _needs_gpu(config: Path) -> bool:
    return "kind: KIND_GPU" in config.read_text()


def _has_gpu() -> bool:
    try:
        return CudaAccess().runtime.device_count() > 0
    except MachineError:
        return False
