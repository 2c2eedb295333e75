"""Files of a folder that may hold anything: only files that end are read."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Final

__all__ = ["MOST_BYTES", "NoSourceError", "read_source"]

MOST_BYTES: Final = 1 << 24
"""More than any source or configuration has."""


class NoSourceError(OSError):
    """It is no regular file, or larger than any source is."""


def read_source(file: Path) -> bytes:
    """Return a file's contents, without waiting; NoSourceError if it is no regular file, or too large; else OSError."""
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        mode = os.fstat(fd).st_mode
        if stat.S_ISDIR(mode):
            raise NoSourceError(errno.EISDIR, os.strerror(errno.EISDIR), str(file))
        if not stat.S_ISREG(mode):
            raise NoSourceError(errno.EINVAL, "it is no regular file", str(file))
        with open(fd, "rb", closefd=False) as opened:
            data = opened.read(MOST_BYTES + 1)
    finally:
        os.close(fd)
    if len(data) > MOST_BYTES:
        raise NoSourceError(errno.EFBIG, f"it is larger than {MOST_BYTES >> 20} MiB", str(file))
    return data
