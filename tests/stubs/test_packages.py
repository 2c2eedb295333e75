"""The wheel and the source distribution carry the stubs, and mypy finds them where the wheel is installed."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path
from typing import Final

from .sources import MODULES, STUBS

ROOT: Final = STUBS.parent
FILES: Final = {f"{module}-stubs/__init__.pyi" for module in MODULES}
MODEL: Final = """
import triton_python_backend_utils as pb_utils

import shm_backend_utils

reveal_type(pb_utils.Tensor.is_cpu)
reveal_type(shm_backend_utils.Call.put)
"""


def run(*command: str, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_has_the_stubs_as_packages_beside_the_library(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {name for name in names if name.endswith(".pyi")} == FILES
    assert "shm_backend_utils/py.typed" in names
    roots = {name.split("/")[0] for name in names}
    assert {root for root in roots if not root.endswith(".dist-info")} == {"shm_backend_utils"} | {
        name.split("/")[0] for name in FILES
    }


def test_mypy_finds_them_where_the_wheel_is_installed(wheel: Path, tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    venv.create(environment, symlinks=True)
    python = environment / "bin" / "python"
    (site_packages,) = environment.glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:  # which is all that an installer does with it
        archive.extractall(site_packages)
    # What the stubs are about, from this environment; what leads to this checkout is not read there.
    (site_packages / "numpy.pth").write_text(sysconfig.get_path("purelib"))
    (tmp_path / "model.py").write_text(MODEL)
    options = ["--strict", "--config-file=", "--no-incremental", "--python-executable", str(python)]
    told = run(sys.executable, "-m", "mypy", *options, "model.py", cwd=tmp_path)
    assert 'Revealed type is "def (self: c_python_backend_utils.Tensor) -> bool"' in told
    assert 'Revealed type is "def (self: shm_backend_utils.' in told
