"""Where the recipes are, and how what is in them is run."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final
from unittest import mock

import numpy as np
import numpy.typing as npt

from scripts.tools.lone_emulator import LoneServer
from shm_backend_utils import dtypes
from shm_backend_utils.tensors.view import DIRECT, TensorView
from shm_backend_utils.testing.emulator import NAME

__all__ = ["EXAMPLES", "RECIPES", "Call", "load_model", "run_script"]

EXAMPLES: Final = Path(__file__).resolve().parents[2] / "examples"
RECIPES: Final = sorted(readme.parent.name for readme in EXAMPLES.glob("*/README.md"))


def run_script(script: str, *arguments: str) -> str:
    """Run a recipe's script as a user would, and return what it prints."""
    command = [sys.executable, str(EXAMPLES / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout


def load_model(recipe: str, model: str) -> tuple[Any, Any]:
    """Return the module of a recipe's model, and the model, initialized without Triton, for ``infer`` alone."""
    file = EXAMPLES / recipe / "model_repository" / model / "1" / "model.py"
    spec = importlib.util.spec_from_file_location(f"model_of_{recipe}", file)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    with mock.patch.dict(sys.modules, {NAME: LoneServer().backend}):
        spec.loader.exec_module(module)
    module.ShmSession = SimpleNamespace(from_args=lambda args: None)
    instance = module.TritonPythonModel()
    instance.initialize({})
    return module, instance


class Call:
    """A call over memory that the test has, too."""

    def __init__(self, given: npt.NDArray[Any], output: npt.NDArray[Any]) -> None:
        self._given = given.view()
        self._given.flags.writeable = False
        self._output = output

    def input(self, name: str) -> TensorView:
        return TensorView(name, self._given, dtypes.from_numpy(self._given.dtype, name), DIRECT)

    def output(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> TensorView:
        assert (shape, np.dtype(dtype)) == (self._output.shape, self._output.dtype)
        return TensorView(name, self._output, dtypes.from_numpy(self._output.dtype, name), DIRECT)
