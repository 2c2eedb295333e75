"""What the client half needs is not installed: the error names the extra."""

from __future__ import annotations

import subprocess
import sys

import pytest

ADVICE = "run pip install 'triton-shm-backend-utils[client]'"


def last_line_without(library: str, program: str) -> str:
    """Return the last line that Python prints when a program imports what is not there."""
    hidden = f"import sys; sys.modules[{library!r}] = None\n{program}"
    done = subprocess.run([sys.executable, "-c", hidden], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    return done.stderr.splitlines()[-1]


def test_without_tritonclient() -> None:
    line = last_line_without("tritonclient", "import shm_backend_utils.client")
    assert line.startswith("ModuleNotFoundError: shm_backend_utils.client lacks a library (")
    assert "tritonclient" in line
    assert line.endswith(f"); {ADVICE}")


@pytest.mark.parametrize(("library", "url"), [("grpc", "localhost:1"), ("aiohttp", "http://localhost:1")])
def test_without_what_one_protocol_needs(library: str, url: str) -> None:
    line = last_line_without(library, f"from shm_backend_utils.client import ShmClient; ShmClient({url!r})")
    assert line.startswith("ModuleNotFoundError: shm_backend_utils.client lacks a library (")
    assert library in line
    assert line.endswith(f"); {ADVICE}")


def test_the_model_half_needs_none_of_them() -> None:
    hidden = "import sys; sys.modules['tritonclient'] = None; import shm_backend_utils.model"
    subprocess.run([sys.executable, "-c", hidden], check=True)
