"""The files of a model repository: their layout, and a reader that copes with any kind of file."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Final

__all__ = [
    "CODE_FILE",
    "CONFIG_FILE",
    "MOST_BYTES",
    "NoSourceError",
    "is_model_folder",
    "read_source",
    "version_folders",
]

CONFIG_FILE: Final = "config.pbtxt"
CODE_FILE: Final = "model.py"
"""The code of a version, where the configuration names no other file."""


def version_folders(model: Path) -> list[Path]:
    """Return the folders of a model's versions, the oldest first; OSError if the model's folder cannot be read."""
    versions = [each for each in model.iterdir() if each.name.isdecimal() and each.is_dir()]
    return sorted(versions, key=lambda version: int(version.name))


def is_model_folder(folder: Path) -> bool:
    """Return whether a folder has a configuration, or a version with code; OSError if it cannot be read."""
    return (folder / CONFIG_FILE).exists() or any(
        (version / CODE_FILE).is_file() for version in version_folders(folder)
    )


MOST_BYTES: Final = 1 << 24
"""The most bytes that a source or a configuration may have."""


class NoSourceError(OSError):
    """A file is not a regular file, or too large to be a source."""


def read_source(file: Path) -> bytes:
    """Return a file's contents without blocking; NoSourceError if it is not regular, or too large; else OSError."""
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        mode = os.fstat(fd).st_mode
        if stat.S_ISDIR(mode):
            raise NoSourceError(errno.EISDIR, os.strerror(errno.EISDIR), str(file))
        if not stat.S_ISREG(mode):
            raise NoSourceError(errno.EINVAL, "it is not a regular file", str(file))
        with open(fd, "rb", closefd=False) as opened:
            data = opened.read(MOST_BYTES + 1)
    finally:
        os.close(fd)
    if len(data) > MOST_BYTES:
        raise NoSourceError(errno.EFBIG, f"it is larger than {MOST_BYTES >> 20} MiB", str(file))
    return data
