"""Sizes that are a little larger than they must be, so that memory of one call fits the next ones like it. Pure."""

from __future__ import annotations

__all__ = ["roomy"]


def roomy(byte_size: int, granularity: int) -> int:
    """Return a size that is up to an eighth larger, or up to the next multiple of ``granularity``."""
    step = max(granularity, 1 << max(byte_size.bit_length() - 4, 0))
    return -(-byte_size // step) * step
