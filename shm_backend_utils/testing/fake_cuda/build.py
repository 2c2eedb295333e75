"""Builds the fake driver's library from the C sources beside this file, once for each state of them."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Final

from ...errors import MachineError

__all__ = ["library"]

_SOURCES: Final = Path(__file__).parent / "libcuda"
_NAME: Final = "libcuda.so.1"  # by which cuda-bindings ask for it
_FLAGS: Final = (
    *("-std=gnu11", "-O2", "-g", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-fvisibility=hidden", "-pthread"),
    *(f"-Wl,-soname,{_NAME}", "-Wl,-z,defs", "-Wl,-Bsymbolic"),
)


def library() -> Path:
    """Return the library, built if need be. It is named ``libcuda.so.1`` and lies in a folder of its own.

    So ``LD_LIBRARY_PATH`` with that folder lets any process use it as its CUDA driver. Several may build at once.
    MachineError if there is no C compiler, or it could not build it.
    """
    sources = sorted(_SOURCES.glob("*.[ch]"))
    state = hashlib.sha256(repr(_FLAGS).encode())
    for source in sources:
        state.update(source.name.encode() + b"\0" + source.read_bytes())
    built = _own_folder() / state.hexdigest()[:16] / _NAME
    if not built.exists():
        _build([source for source in sources if source.suffix == ".c"], built)
    return built


def _own_folder() -> Path:
    folder = Path(tempfile.gettempdir()) / f"shm-backend-utils-fake-cuda-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise MachineError(
            f"{folder} is not this user's alone, so no library is loaded from there; remove it, or set TMPDIR"
        )
    return folder


def _build(sources: list[Path], built: Path) -> None:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise MachineError("the fake CUDA driver is built from C, and there is neither gcc nor cc; install gcc")
    built.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=built.parent) as folder:
        made = Path(folder) / _NAME
        command = [compiler, *_FLAGS, "-o", str(made), *map(str, sources), "-ldl"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise MachineError(f"{compiler} could not build the fake CUDA driver; it says: {done.stderr[:2000]}")
        made.replace(built)  # whoever builds at the same time, puts the same there
