"""Who may open a region."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["PRIVATE", "Access"]


@dataclass(frozen=True, slots=True)
class Access:
    """Who may open a region: permission bits, and the group that they speak of (None: this process' own)."""

    mode: int = 0o600
    group_id: int | None = None


PRIVATE: Final = Access()
"""This user alone."""
