"""The newest server that there is here, which no wheel carries: a folder, or an archive of one."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from shm_backend_utils.errors import MachineError
from shm_backend_utils.server.fetching import appear_whole, cache_folder
from shm_backend_utils.server.installation import PYTHON, Installation

from .. import ROOT

__all__ = ["VARIABLE", "WHERE", "find_newest"]

VARIABLE: Final = "SHM_BACKEND_UTILS_SERVER_NEWEST"
_BESIDE: Final = ROOT.parent / "shared" / "servers"
_ARCHIVE: Final = ".tar.xz"
_STUB: Final = "triton_python_backend_stub"
WHERE: Final = f"{VARIABLE} names none, and {_BESIDE} has none: a server's folder, or {_ARCHIVE} of one"


def find_newest(python: str | None, environment: Mapping[str, str] = os.environ, beside: Path = _BESIDE) -> Path | None:
    """Return the folder of the newest server for a version of Python, unpacked if need be; None if there is none.

    Raises
    ------
    MachineError
        What the environment names is not there, or an archive has no server.
    """
    named = environment.get(VARIABLE)
    if named and not Path(named).exists():
        raise MachineError(f"{VARIABLE} names {named}, which is not there")
    found = [Path(named).absolute()] if named else [each for each in beside.glob("*") if _may_be_one(each)]
    newest = max(found, key=lambda each: [int(number) for number in re.findall(r"\d+", each.name)], default=None)
    return _unpacked(newest, python or PYTHON) if newest is not None and newest.is_file() else newest


def _may_be_one(place: Path) -> bool:
    return place.name.endswith(_ARCHIVE) or Installation(place).is_complete


def _unpacked(archive: Path, python: str) -> Path:
    """Unpack a server to the cache, once for each Python, with the stub for it that it may have in ``stubs``."""
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()[:12]
    server = Installation(cache_folder() / f"{archive.name.removesuffix(_ARCHIVE)}-{digest}-py{python}")

    def fill(scratch: Path, fresh: Path) -> None:
        done = subprocess.run(["tar", "-xf", archive, "-C", scratch], capture_output=True, text=True, check=False)
        binary = next(scratch.glob("**/bin/tritonserver"), None)
        if done.returncode or binary is None:
            raise MachineError(f"{archive} holds no server: {done.stderr.strip() or 'it has no bin/tritonserver'}")
        folder = binary.parents[1]
        stub = folder / "stubs" / python / _STUB
        if stub.is_file():
            shutil.copy(stub, folder / "backends" / "python" / _STUB)
        folder.rename(fresh)

    if not server.is_complete:
        appear_whole(server.folder, lambda: server.is_complete, fill)
    return server.folder
