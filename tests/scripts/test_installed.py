"""The wheel in empty environments, used from outside the checkout, as somebody does who has nothing else of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from typing import Final

import pytest

import shm_backend_utils
from scripts.tools import ROOT
from scripts.tools.release import build

NUMPY_1: Final = pytest.param(
    "numpy==1.26.4",
    "1.26.4",
    marks=pytest.mark.skipif(sys.version_info >= (3, 13), reason="there is no NumPy 1.26 for this Python"),
)
# What runs the direct path without a server is the model half in the harness, which needs NumPy and nothing else.
MODEL_HALF = """
import sys
import numpy as np
import shm_backend_utils
from shm_backend_utils.model import ShmSession
print(np.__version__, shm_backend_utils.__file__, 'tritonclient' in sys.modules)
"""

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    (wheel,) = build(ROOT, tmp_path_factory.mktemp("wheel"), ("wheel",), "1700000000")
    return wheel


def run(*command: str | Path, cwd: Path, status: int = 0) -> str:
    """Run a command without what tells this process of packages, and return what it prints."""
    hidden = {"PYTHONPATH", "VIRTUAL_ENV"}
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout if status == 0 else done.stderr


def make_environment(folder: Path, *requirements: str) -> Path:
    venv.create(folder, symlinks=True)
    options = ["--quiet", "--no-input", "--no-compile", "--disable-pip-version-check"]
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install", *options]
    run(*pip, *requirements, cwd=folder)
    return folder / "bin"


@pytest.mark.parametrize(("numpy", "version"), [NUMPY_1, ("numpy>=2", "2.")])
def test_with_numpy_alone_the_model_half_works(wheel: Path, tmp_path: Path, numpy: str, version: str) -> None:
    commands = make_environment(tmp_path / "environment", str(wheel), numpy)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    found, file, has_client = run(commands / "python", "-c", MODEL_HALF, cwd=elsewhere).split()
    assert found.startswith(version)
    assert Path(file).is_relative_to(tmp_path)
    assert has_client == "False"
    command = commands / "shm-backend-utils"
    assert run(command, "--version", cwd=elsewhere) == f"triton-shm-backend-utils {shm_backend_utils.__version__}\n"
    run(command, "regions", cwd=elsewhere)
    assert run(command, "demo", cwd=elsewhere, status=1).endswith("pip install 'CHECKOUT_OR_WHEEL[demo]'\n")
    gone = run(command, "bench", "--quick", cwd=elsewhere, status=2)
    assert gone == "shm-backend-utils has no bench any more: use `scripts/bench` in a checkout\n"


def test_the_demo_of_the_wheel_runs_with_its_own_server_and_models(wheel: Path, tmp_path: Path) -> None:
    """Both halves are the wheel's. Packages that it needs are those of this environment, which take long to install."""
    commands = make_environment(tmp_path / "environment", "--no-deps", str(wheel))
    (site_packages,) = (tmp_path / "environment").glob("lib/python*/site-packages")
    (site_packages / "others.pth").write_text(sysconfig.get_path("purelib"))  # what leads to the checkout is not read
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert run(commands / "python", "-c", MODEL_HALF, cwd=elsewhere).split()[1].startswith(str(tmp_path))
    printed = run(commands / "shm-backend-utils", "demo", "--rounds", "1", cwd=elsewhere)
    assert json.loads(printed.splitlines()[-1])["identical"] is True
    assert (elsewhere / "demo.png").is_file()
