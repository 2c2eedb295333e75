"""The models of level 2, in one folder for a server."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

import shm_backend_utils

from ... import ROOT
from ...common.sample_models import REPOSITORY, copy_models, models_in

__all__ = ["write_repository"]

_GPU_CHECK: Final = Path(__file__).resolve().parents[1]
_OWN_MODELS: Final = _GPU_CHECK / "models"
_PACKAGE: Final = Path(shm_backend_utils.__file__).parent
_SAMPLES: Final = ("gpu_multiply", "gpu_normalize")
_STAND_IN: Final = Path(__file__).with_name("stand_in.py")
_OF_A_FAKE: Final = ("fake.py", "gpu.py")


def write_repository(folder: Path, *, is_fake: bool) -> Path:
    """Write the models to a folder, each with this package, which need not be installed then; return the folder.

    If there is no GPU, those that need one get a fake one.
    """
    copy_models([*(REPOSITORY / name for name in _SAMPLES), *models_in(_OWN_MODELS)], folder)
    for model in models_in(folder):
        shutil.copytree(_PACKAGE, model / "1" / _PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
        if is_fake and "KIND_GPU" in (model / "config.pbtxt").read_text():
            _replace_gpu(model)
    return folder


def _replace_gpu(model: Path) -> None:
    config, home = model / "config.pbtxt", model / "1"
    config.write_text(config.read_text().replace("KIND_GPU", "KIND_CPU"))
    (home / "model.py").rename(home / "replaced_model.py")
    shutil.copy(_STAND_IN, home / "model.py")
    package = home / _GPU_CHECK.relative_to(ROOT)  # where the stand-in imports it from
    package.mkdir(parents=True)
    for module in _OF_A_FAKE:
        shutil.copy(_GPU_CHECK / module, package)
