"""Make the copy, and put it in its place in one step: a server that loads the model sees the old one or the new one."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Final

from ... import __version__
from ...errors import MachineError
from ..signals import undisturbed
from ..vendored_copy import DISTRIBUTION, PACKAGE, UNFINISHED, Flaw, Manifest, digest_of, files_below, flaws
from .parts import parts_of_model_half

__all__ = ["AGAIN", "place_copy"]

AGAIN: Final = "run vendor again"

_PACKAGE_FOLDER: Final = Path(__file__).parents[2]
_ALWAYS: Final = ("__init__.py", "py.typed")
_LICENCE: Final = "LICENSE"
_AT_WORKING_DIRECTORY: Final = -100  # AT_FDCWD
_EXCHANGE: Final = 2  # RENAME_EXCHANGE
_CANNOT_EXCHANGE: Final = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)


def place_copy(model: Path) -> list[Flaw]:
    """Put a copy of the model half into a model's folder, in the place of one that is there.

    Who may read and enter the model's folder may read the copy, whatever the umask is.

    Parameters
    ----------
    model : pathlib.Path
        The folder.

    Returns
    -------
    list of Flaw
        What was wrong with the copy that was there.

    Raises
    ------
    MachineError
        Something would be lost that vendor did not make; or another process is at it, or this installation is not
        complete.
    OSError
        It cannot be written; then all is as it was.
    """
    with _alone_in(model):
        found = flaws(model)  # what was seen before may have changed since
        _check_that_nothing_is_lost(found)
        for left in model.glob(f"{UNFINISHED}*"):
            shutil.rmtree(left)
        scratch = Path(tempfile.mkdtemp(prefix=UNFINISHED, dir=model))
        try:
            copy = scratch / PACKAGE
            _fill(copy)
            _open_to_readers_of(model, copy)
            _swap(copy, model / PACKAGE, scratch / "old")
        finally:
            with undisturbed():
                shutil.rmtree(scratch)
        return found


def _check_that_nothing_is_lost(found: list[Flaw]) -> None:
    for flaw in found:
        if flaw.kind == "foreign":
            raise MachineError(f"{flaw.text}; it is left as it is: move it away, and {AGAIN}")
        if flaw.kind == "added":
            raise MachineError(f"{flaw.text}; that would be lost: move it away, and {AGAIN}")


def _fill(copy: Path) -> None:
    copy.mkdir()
    for part in [*(_PACKAGE_FOLDER / name for name in _ALWAYS), *parts_of_model_half(_PACKAGE_FOLDER)]:
        for file in [part] if part.is_file() else [part / path for path in files_below(part)]:
            place = copy / file.relative_to(_PACKAGE_FOLDER)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(file.read_bytes())  # not by shutil, which goes on after an error and tells of the source
    (copy / _LICENCE).write_text(_licence(), encoding="utf-8")
    Manifest(__version__, {path: digest_of(copy / path) for path in files_below(copy)}).write(copy)


def _licence() -> str:
    """Return the licence, which goes wherever the code goes."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        for file in metadata.files(DISTRIBUTION) or ():
            if file.name == _LICENCE:
                return file.read_text(encoding="utf-8")
    beside = _PACKAGE_FOLDER.parent / _LICENCE
    if beside.is_file():  # a checkout that is not installed
        return beside.read_text(encoding="utf-8")
    raise MachineError(f"this installation lacks its {_LICENCE}, which goes with every copy; install it again")


def _open_to_readers_of(model: Path, copy: Path) -> None:
    # Not by everybody: a folder that all may write to, as /tmp, may protect what is in it.
    mode = model.stat().st_mode & 0o775 | 0o700
    for folder, _, names in os.walk(copy):
        Path(folder).chmod(mode)
        for name in names:
            (Path(folder) / name).chmod(mode & 0o666)


@contextlib.contextmanager
def _alone_in(model: Path) -> Iterator[None]:
    """Keep others out that do the same: what is there under our prefix was then left by who is no more."""
    handle = os.open(model, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise MachineError(f"another process is putting a copy into {model}; wait until it is done") from None
        yield
    finally:
        os.close(handle)


def _swap(fresh: Path, place: Path, aside: Path) -> None:
    """Put a folder in the place of another one, which is gone or aside then."""
    if not place.exists():
        fresh.rename(place)
    elif not _exchanged(fresh, place):
        try:
            place.rename(aside)
            fresh.rename(place)
        except BaseException:
            if aside.exists() and not place.exists():
                aside.rename(place)
            raise


def _exchanged(one: Path, other: Path) -> bool:
    """Let two folders change places in one step; return whether the file system can do that."""
    rename: Callable[..., int] | None = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    here = _AT_WORKING_DIRECTORY
    if rename(here, os.fsencode(one), here, os.fsencode(other), _EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _CANNOT_EXCHANGE:
        return False
    raise OSError(number, os.strerror(number), os.fspath(other))
