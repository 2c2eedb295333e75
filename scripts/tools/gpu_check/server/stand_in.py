"""A rehearsal's ``model.py``: the real one, which lies beside it under another name, on a fake GPU."""

from __future__ import annotations

import importlib
from typing import Any

from scripts.tools.gpu_check.fakes import install_fakes
from shm_backend_utils.gpu.runtime import CudaRuntime
from shm_backend_utils.testing.fake_cuda.driver import FakeDriver

FakeDriver.load()
install_fakes(CudaRuntime())
TritonPythonModel: Any = importlib.import_module("replaced_model").TritonPythonModel
