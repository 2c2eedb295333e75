"""A rehearsal's ``model.py``: the real one, which lies beside it under another name, on a fake GPU.

Triton finds it in the folder of the modules that it imports, which are copies, so their names are written in full.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from scripts.tools.gpu_check.fake import load_fake_gpu

_GPU = load_fake_gpu()
sys.modules["cupy"] = _GPU.cupy
_REPLACED: Any = importlib.import_module("replaced_model")
_REPLACED.CudaAccess = lambda: _GPU.access
TritonPythonModel = _REPLACED.TritonPythonModel
