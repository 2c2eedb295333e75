"""The model `fake_gpu`, with events."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "fake_gpu"))

import deeds


class TritonPythonModel(deeds.TritonPythonModel):
    """All that differs is in the configuration."""
