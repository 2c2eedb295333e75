"""The emulated modules have what the stubs say, as mypy's ``stubtest`` sees it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from .sources import MODULES

ALLOWED: Final = Path(__file__).parent / "allowed_differences.txt"
OURS: Final = """
from shm_backend_utils.testing.emulator.module import backend_module


class _NoServer:
    metrics = None

    def model_dir(self):
        return ""


_module = backend_module(_NoServer())
globals().update({name: value for name, value in vars(_module).items() if not name.startswith("__")})
"""
COMPILED: Final = """
from triton_python_backend_utils import (
    InferenceRequest,
    InferenceResponse,
    Logger,
    MetricFamily,
    PreferredMemory,
    TRITONSERVER_MEMORY_CPU,
    TRITONSERVER_MEMORY_GPU,
    Tensor,
    TritonError,
    TritonModelException,
    is_model_ready,
    load_model,
    unload_model,
)

from shm_backend_utils.testing.emulator.request import ResponseIterator
from shm_backend_utils.testing.emulator.request import InferenceTrace, MemoryType
from shm_backend_utils.testing.emulator.metrics import Metric, MetricKind
from shm_backend_utils.testing.emulator.response import InferenceResponseSender

COUNTER, GAUGE, HISTOGRAM = MetricKind
"""


@pytest.fixture
def emulated(tmp_path: Path) -> Path:
    """A folder with both modules, as a process of an emulated model has them."""
    (tmp_path / "triton_python_backend_utils.py").write_text(OURS)
    (tmp_path / "c_python_backend_utils.py").write_text(COMPILED)
    return tmp_path


def differences(emulated: Path) -> list[str]:
    """Return what ``stubtest`` has against them, one a line, but for what is allowed; what is allowed in vain, too."""
    command = [sys.executable, "-m", "mypy.stubtest", *MODULES, "--concise", "--allowlist", str(ALLOWED)]
    elsewhere = emulated / "elsewhere"  # where mypy finds the stubs, and not the modules before them
    elsewhere.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(emulated)}
    done = subprocess.run(command, cwd=elsewhere, env=environment, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert bool(lines) == bool(done.returncode)
    return lines


@pytest.mark.timeout(600)
def test_the_emulator_has_what_the_stubs_say(emulated: Path) -> None:
    assert differences(emulated) == []
