"""The users who may open a region."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final

from ..errors import CallerError

__all__ = ["PRIVATE", "Access"]


@dataclass(frozen=True, slots=True)
class Access:
    """The users who may open a region: permission bits, and their group (None: this process' own)."""

    mode: int = 0o600
    group_id: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.mode, int) or self.mode & ~0o066 != 0o600:
            raise CallerError(f"mode is {self.mode!r}; expected for example 0o600, or 0o660 with a group")

    def give_to(self, fd: int) -> None:
        """Have an open file of this process' own opened by these alone, whatever the umask says."""
        os.fchmod(fd, self.mode)
        if self.group_id is not None:
            os.fchown(fd, -1, self.group_id)


PRIVATE: Final = Access()
"""This user alone."""
