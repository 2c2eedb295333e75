"""What a process is told that has no file descriptor left."""

from __future__ import annotations

import contextlib
import errno
import resource
from collections.abc import Iterator
from typing import Final

from ..errors import MachineError

__all__ = ["NO_DESCRIPTORS", "NoDescriptorsError", "lack_of_descriptors_told", "no_descriptors"]

NO_DESCRIPTORS: Final = frozenset({errno.EMFILE, errno.ENFILE})
"""The numbers of the errors that say so."""


class NoDescriptorsError(MachineError):
    """This process has no file descriptor left."""


def no_descriptors(needed: str) -> NoDescriptorsError:
    """Return the error; ``needed`` says what takes how many."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return NoDescriptorsError(
        f"{needed}, and this process has none left of {most}; release results sooner, or raise the limit (ulimit -n)"
    )


@contextlib.contextmanager
def lack_of_descriptors_told() -> Iterator[None]:
    """Turn the operating system's errors into NoDescriptorsError, where a region is opened."""
    try:
        yield
    except OSError as error:
        if error.errno not in NO_DESCRIPTORS:
            raise
        raise no_descriptors("a shared-memory region takes two file descriptors") from None
