"""Sizes that are larger than they must be. Pure."""

from __future__ import annotations

from ..protocol.layout import PAGE_SIZE

__all__ = ["roomy", "whole_pages"]


def roomy(byte_size: int, granularity: int) -> int:
    """Return a size that is up to an eighth larger, or up to the next multiple of ``granularity``."""
    step = max(granularity, 1 << max(byte_size.bit_length() - 4, 0))
    return -(-byte_size // step) * step


def whole_pages(byte_size: int) -> int:
    """Return the least size of so many bytes at least that a region can have."""
    return -(-byte_size // PAGE_SIZE) * PAGE_SIZE
