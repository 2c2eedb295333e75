"""The model `fake_gpu`, with pinned memory."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "fake_gpu"))

from deeds import TritonPythonModel

__all__ = ["TritonPythonModel"]
