"""Tensors that follow one another in one mapping, as one tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from .. import dtypes
from ..tensors.strings_view import StringsView
from ..tensors.view import TensorView
from .direct import DirectPlan
from .places import DIRECT

__all__ = ["joined"]

_MOST_REMEMBERED: Final = 64


def joined(first: DirectPlan | None, parts: Sequence[TensorView], *, writable: bool) -> TensorView | None:
    """Return views as one view, along the first axis; None if they do not lie so.

    Parameters
    ----------
    first : DirectPlan or None
        Of the request that has the first part. It remembers what was found.
    parts : sequence of TensorView
        At least one; equal but for their rows.
    writable : bool
        Whether the view may be written to.
    """
    if len(parts) == 1:
        return parts[0]
    if first is None:
        return None
    key = tuple(parts)
    if key not in first.joined:
        if len(first.joined) >= _MOST_REMEMBERED:
            first.joined.clear()
        first.joined[key] = _join(first, parts, writable=writable)
    return first.joined[key]


def _join(first: DirectPlan, parts: Sequence[TensorView], *, writable: bool) -> TensorView | None:
    head = parts[0]
    if any(isinstance(part, StringsView) or part.path != DIRECT for part in parts):
        return None
    row_count = sum(part.shape[0] for part in parts)
    byte_size = sum(part.attributes.byte_size for part in parts)
    for memory in first.memories:
        begin = memory.offset_of(head.array)
        if begin is None or not 0 <= begin <= memory.attributes().byte_size - byte_size:
            continue
        end = begin
        for part in parts:
            if memory.offset_of(part.array) != end:
                return None
            end += part.attributes.byte_size
        dtype, shape = dtypes.BY_NAME[head.triton_dtype], (row_count, *head.shape[1:])
        return memory.view(head.name, DIRECT, begin, byte_size, dtype, shape, writable=writable)
    return None
