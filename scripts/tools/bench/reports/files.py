"""How reports get into files: whole or not at all, so that a full disk does not cost the ones that were there."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

__all__ = ["ReportError", "check_file", "check_folder", "write"]


class ReportError(Exception):
    """A report cannot be written, or an earlier one not be read; the message says all that a user needs."""


def check_file(file: Path) -> None:
    """Raise :class:`ReportError` if this file could not be written: better before everything is measured than after."""
    with _told(file):
        if file.is_dir():
            raise IsADirectoryError(0, "it is a folder; expected a file")
        if not _is_special(file):
            _try_in(_real(file).parent)


def check_folder(folder: Path) -> None:
    """Make a folder where there is none. Raise :class:`ReportError` if nothing could be written into it."""
    with _told(folder):
        folder.mkdir(parents=True, exist_ok=True)
        _try_in(folder)


def write(file: Path, content: bytes) -> None:
    """Replace a file.

    Raises
    ------
    ReportError
        That failed; the file is as it was.
    """
    with _told(file):
        if _is_special(file):
            file.write_bytes(content)
            return
        target = _real(file)
        beside = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            beside.write_bytes(content)
            beside.replace(target)
        finally:
            beside.unlink(missing_ok=True)


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ReportError(f"{path} cannot be written: {error.strerror}") from None


def _try_in(folder: Path) -> None:
    with tempfile.TemporaryFile(dir=folder):
        pass


def _is_special(file: Path) -> bool:
    """Return whether this is a device, or a pipe such as ``/dev/stdout``, which nothing may take the place of."""
    return file.exists() and not file.is_file()


def _real(file: Path) -> Path:
    """Return what a link stands for: the link itself stays."""
    return Path(os.path.realpath(file))
