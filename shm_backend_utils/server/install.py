"""Install the tritonserver that the wheel ``nvidia-pytriton`` carries, in a folder of its own.

The wheel holds a complete server: the binary, its libraries, the Python backend, and one stub for each Python version.
It is fetched without its dependencies, because it pins ``numpy<2``, and it is never imported. What is installed::

    DIR/bin/tritonserver          DIR/lib/*.so           DIR/backends/python/   with the stub of this Python's version

and, for servers that are to have it, ``DIR/numpy``: see :mod:`.stub_numpy`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ..errors import MachineError
from .fetching import appear_whole, cache_folder, fetch_wheel

__all__ = ["FOLDER_VARIABLE", "Installation", "default_folder", "install"]

WHEEL: Final = "nvidia-pytriton==0.7.0"
SERVER_VERSION: Final = "2.51.0"
FOLDER_VARIABLE: Final = "SHM_BACKEND_UTILS_SERVER"
"""Environment variable that names another folder to install to."""

_PYTHON: Final = f"{sys.version_info.major}.{sys.version_info.minor}"


@dataclass(frozen=True)
class Installation:
    """An installed server.

    Attributes
    ----------
    folder : pathlib.Path
        Holds ``bin``, ``lib`` and ``backends``, and maybe ``numpy``.
    """

    folder: Path

    @property
    def binary(self) -> Path:
        """The server's executable."""
        return self.folder / "bin" / "tritonserver"

    @property
    def libraries(self) -> Path:
        """The folder of the libraries that came with it."""
        return self.folder / "lib"

    @property
    def backends(self) -> Path:
        """The folder for ``--backend-directory``."""
        return self.folder / "backends"

    @property
    def numpy(self) -> Path:
        """The folder for the NumPy that the stub was built for."""
        return self.folder / "numpy"

    @property
    def is_complete(self) -> bool:
        """Whether everything is there. An installation appears whole or not at all."""
        return self.binary.is_file()

    def environment(self, python_environment: Path | None = None) -> dict[str, str]:
        """Return the environment to start the server in.

        The stub runs an isolated interpreter, which ignores ``PYTHONPATH`` and finds its packages through ``PATH``; it
        needs the shared library of this interpreter. What is found through ``LD_LIBRARY_PATH`` here, such as CUDA's
        libraries, is found there, too.

        Parameters
        ----------
        python_environment : pathlib.Path, optional
            A virtual environment of this interpreter, for the stub's packages; those of this process if not given.
        """
        environment = dict(os.environ)
        prefixes = [prefix for prefix in (python_environment, sys.prefix) if prefix is not None]
        programs = [str(Path(prefix) / "bin") for prefix in prefixes]
        environment["PATH"] = os.pathsep.join([*programs, environment.get("PATH", os.defpath)])
        libraries = [str(self.libraries), str(_libpython().parent), environment.get("LD_LIBRARY_PATH")]
        environment["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, libraries))
        return environment

    def knows_flag(self, flag: str) -> bool:
        """Return whether the server has a command-line flag. A server exits on one that it does not know."""
        usage = subprocess.run(
            [self.binary, "--help"], env=self.environment(), capture_output=True, text=True, check=False
        )
        return flag in (usage.stdout + usage.stderr).split()


def default_folder() -> Path:
    """Return where the server is installed unless somebody says otherwise: one folder per server and Python version."""
    chosen = os.environ.get(FOLDER_VARIABLE)
    if chosen:
        return Path(chosen).expanduser()
    return cache_folder() / f"tritonserver-{SERVER_VERSION}-py{_PYTHON}"


def install(folder: Path | None = None) -> Installation:
    """Install the server, unless it is installed, and return it. Fetches a wheel of 55 MB with pip.

    Parameters
    ----------
    folder : pathlib.Path, optional
        Where to; :func:`default_folder` if not given. Two processes may install to the same folder at once.

    Raises
    ------
    MachineError
        The wheel cannot be fetched, or this interpreter cannot be run by the server's stub.
    """
    installation = Installation(folder or default_folder())
    _libpython()
    if installation.is_complete:
        return installation

    def fill(scratch: Path, fresh: Path) -> None:
        _unpack(fetch_wheel(WHEEL, "the server", scratch), fresh)

    appear_whole(installation.folder, lambda: installation.is_complete, fill)
    return installation


def _unpack(wheel: Path, folder: Path) -> None:
    """Lay the server out, with its parts in the same places relative to each other as in the wheel's RPATHs."""
    stub = f"pytriton/tritonserver/python_backend_stubs/{_PYTHON}/"
    homes = {
        "pytriton/tritonserver/bin/": folder / "bin",
        "pytriton/tritonserver/backends/python/": folder / "backends" / "python",
        stub: folder / "backends" / "python",
        "nvidia_pytriton.libs/": folder / "lib",
    }
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        if not any(name.startswith(stub) for name in names):
            raise MachineError(f"the wheel {WHEEL} has no stub for Python {_PYTHON}; use Python 3.10 to 3.13")
        for name in names:
            home = next((home for start, home in homes.items() if name.startswith(start)), None)
            if home is None or name.endswith("/"):
                continue
            home.mkdir(parents=True, exist_ok=True)
            target = home / Path(name).name
            with archive.open(name) as source, target.open("wb") as sink:
                shutil.copyfileobj(source, sink)
    for executable in (folder / "bin" / "tritonserver", folder / "backends" / "python" / "triton_python_backend_stub"):
        executable.chmod(0o755)


def _libpython() -> Path:
    """Return the interpreter's shared library, which the stub loads."""
    name = f"libpython{_PYTHON}.so.1.0"
    folders = [sysconfig.get_config_var("LIBDIR"), f"{sys.base_prefix}/lib", *sysconfig.get_config_vars("LIBPL")]
    for folder in folders:
        if folder and (Path(folder) / name).exists():
            return Path(folder) / name
    multiarch = sysconfig.get_config_var("MULTIARCH") or ""
    system = Path("/usr/lib") / multiarch / name
    if system.exists():
        return system
    raise MachineError(
        f"this Python has no shared library {name}, which Triton's Python backend loads; install it (Debian, Ubuntu: "
        f"apt-get install libpython{_PYTHON}) or use a Python that was built with --enable-shared"
    )
