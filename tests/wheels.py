"""Wheels of this package, built without asking an index."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_OPTIONS = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]


def build_wheel(source: Path, folder: Path) -> Path:
    """Build the wheel of a checkout, or of a part of one, in a folder, and return it."""
    command = [sys.executable, "-m", "pip", "wheel", *_OPTIONS, "--wheel-dir", str(folder), str(source)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel
