"""The wheel carries the stubs, and mypy finds them where the wheel is installed."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path
from typing import Final

from .sources import MODULES

FILES: Final = {f"{module}-stubs/__init__.pyi" for module in MODULES}
MODEL: Final = """
import triton_python_backend_utils as pb_utils

import shm_backend_utils

reveal_type(pb_utils.Tensor.is_cpu)
reveal_type(shm_backend_utils.Call.put)
"""


def test_the_wheel_has_the_stubs_beside_the_library_and_mypy_finds_them_where_it_is_installed(
    wheel: Path, tmp_path: Path
) -> None:
    environment = tmp_path / "environment"
    venv.create(environment, symlinks=True)
    python = environment / "bin" / "python"
    (site_packages,) = environment.glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:  # which is all that an installer does with it
        archive.extractall(site_packages)
        names = set(archive.namelist())
    assert {name for name in names if name.endswith(".pyi")} == FILES
    roots = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert roots == {"shm_backend_utils", *(name.split("/")[0] for name in FILES)}
    # What the stubs are about, from this environment; what leads to this checkout is not read there.
    (site_packages / "numpy.pth").write_text(sysconfig.get_path("purelib"))
    (tmp_path / "model.py").write_text(MODEL)
    options = ["--strict", "--config-file=", "--no-incremental", "--python-executable", str(python)]
    command = [sys.executable, "-m", "mypy", *options, "model.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert 'Revealed type is "def (self: c_python_backend_utils.Tensor) -> bool"' in done.stdout
    assert 'Revealed type is "def (self: shm_backend_utils.' in done.stdout
