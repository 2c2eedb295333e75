"""The NumPy that the server's stub was built for, and a Python environment whose stubs find it before another one.

Before Triton 2.52, the stub was built for NumPy 1. In a model that has NumPy 2 its ``as_numpy()`` gives the first
element everywhere, arrays leave without their contents, both without an error, and strings end the process. A model
cannot help it, unless it has a ``ShmSession``; so the server brings a NumPy of its own. Later stubs read both.
"""

from __future__ import annotations

import site
import sys
import venv
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Final

from ..errors import MachineError
from .fetching import appear_whole, fetch_wheel
from .installation import Installation

__all__ = ["install_numpy", "is_there_another", "make_environment", "reads_own", "wants_another"]

WHEEL: Final = "numpy==1.26.4"
_READS_BOTH: Final = "2.52"  # built with pybind11 2.12
_FIRST_PYTHON_WITHOUT: Final = (3, 13)  # NumPy has made no wheels of this version for it


def reads_own(installation: Installation) -> bool:
    """Return whether a server's stub reads the NumPy of this interpreter."""
    return installation.is_at_least(_READS_BOTH) or int(metadata.version("numpy").partition(".")[0]) < 2


def is_there_another() -> bool:
    """Return whether there is a NumPy 1 for this Python."""
    return sys.version_info < _FIRST_PYTHON_WITHOUT


def wants_another(installation: Installation) -> bool:
    """Return whether a server's stub reads NumPy 1 alone, and there is one for this Python."""
    return is_there_another() and not installation.is_at_least(_READS_BOTH)


def install_numpy(folder: Path) -> Path:
    """Install that NumPy to a folder, unless it is there, and return the folder. Fetches a wheel of 18 MB with pip.

    MachineError if the wheel cannot be fetched, or not be put there.
    """

    def fill(scratch: Path, fresh: Path) -> None:
        wheel = fetch_wheel(
            WHEEL, 'the NumPy for models that the stub was built for (18 MB; numpy="own" does without)', scratch
        )
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(fresh)

    if not _is_complete(folder):
        try:
            appear_whole(folder, lambda: _is_complete(folder), fill)
        except OSError as error:  # the server may be another user's
            raise MachineError(
                f"NumPy for the server's models cannot be installed in {folder}: {error}; have it installed by who may "
                'write there (scripts/setup does), or do without (numpy="own")'
            ) from error
    return folder


def make_environment(folder: Path, numpy: Path) -> None:
    """Make a virtual environment like that of this interpreter, but with the NumPy of :func:`install_numpy`'s folder.

    Its packages are those that are here now, and later.
    """
    venv.create(folder, symlinks=True)
    packages = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    others = [f"import site; site.addsitedir({place!r})" for place in site.getsitepackages()]
    (packages / "server.pth").write_text("\n".join([str(numpy.resolve()), *others]))


def _is_complete(folder: Path) -> bool:
    return (folder / "numpy").is_dir()
