"""The models of level 2, in one folder for a server."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

from sample_models import REPOSITORY

import shm_backend_utils

__all__ = ["write_repository"]

_PROGRAMS: Final = Path(__file__).resolve().parent
_PACKAGE: Final = Path(shm_backend_utils.__file__).parent
_SAMPLES: Final = ("gpu_multiply", "gpu_normalize")
_OF_A_FAKE: Final = ("gpu_check_fake.py", "gpu_check_gpu.py")
_NO_CACHES: Final = shutil.ignore_patterns("__pycache__")

_IDENTITY_CONFIG: Final = """
backend: "python"
max_batch_size: 0
input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] optional: true } ]
output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] } ]
parameters { key: "SHM_PATHS" value: { string_value: "direct,triton-shm,inline" } }
parameters { key: "FORCE_CPU_ONLY_INPUT_TENSORS" value: { string_value: "no" } }
instance_group [ { kind: KIND_GPU } ]
"""
_EMPTY_CONFIG: Final = """
backend: "python"
max_batch_size: 0
input [ { name: "X" data_type: TYPE_UINT8 dims: [ -1 ] optional: true } ]
output [ { name: "Y" data_type: TYPE_UINT8 dims: [ -1 ] } ]
instance_group [ { kind: KIND_CPU } ]
"""


def write_repository(folder: Path, *, is_fake: bool) -> Path:
    """Write the models to a folder, each with this package, which need not be installed then; return the folder.

    If there is no GPU, those that need one get a fake one.
    """
    for name in _SAMPLES:
        shutil.copytree(REPOSITORY / name, folder / name, ignore=_NO_CACHES)
    _write(folder / "gpu_identity", _IDENTITY_CONFIG, "gpu_check_identity_model.py")
    _write(folder / "gpu_empty", _EMPTY_CONFIG, "gpu_check_empty_model.py")
    for model in folder.iterdir():
        shutil.copytree(_PACKAGE, model / "1" / _PACKAGE.name, ignore=_NO_CACHES)
        if is_fake and "KIND_GPU" in (model / "config.pbtxt").read_text():
            _replace_gpu(model)
    return folder


def _write(model: Path, config: str, program: str) -> None:
    (model / "1").mkdir(parents=True)
    (model / "config.pbtxt").write_text(config)
    shutil.copy(_PROGRAMS / program, model / "1" / "model.py")


def _replace_gpu(model: Path) -> None:
    config, home = model / "config.pbtxt", model / "1"
    config.write_text(config.read_text().replace("KIND_GPU", "KIND_CPU"))
    (home / "model.py").rename(home / "replaced_model.py")
    shutil.copy(_PROGRAMS / "gpu_check_stand_in.py", home / "model.py")
    for module in _OF_A_FAKE:
        shutil.copy(_PROGRAMS / module, home)
