"""Splits a copy between arrays of any strides into rectangles that CUDA can copy: rows of bytes, a pitch apart."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

__all__ = ["Piece", "Plan", "plan"]

_MAX_PITCH: Final = 2**31 - 1  # CU_DEVICE_ATTRIBUTE_MAX_PITCH of every GPU so far


class Piece(NamedTuple):
    """Where one rectangle begins, in bytes from each array's first element."""

    target: int
    source: int


class _Axis(NamedTuple):
    size: int
    target: int
    source: int


@dataclass(frozen=True)
class Plan:
    """A copy as rectangles of equal form. All sizes are in bytes, except for the height in rows."""

    width: int
    height: int
    target_pitch: int  # from row to row; for a single row, its width
    source_pitch: int
    target_begin: int  # of the first rectangle, from the array's first element
    source_begin: int
    others: tuple[_Axis, ...]  # the axes that lead from rectangle to rectangle

    @property
    def count(self) -> int:
        """The number of rectangles."""
        return math.prod(axis.size for axis in self.others)

    def by_rows(self) -> Plan:
        """Return the same copy as single rows."""
        others = (*self.others, _Axis(self.height, self.target_pitch, self.source_pitch))
        return replace(self, height=1, target_pitch=self.width, source_pitch=self.width, others=others)

    def pieces(self) -> Iterator[Piece]:
        """Yield the beginning of each rectangle."""
        for index in itertools.product(*[range(axis.size) for axis in self.others]):
            steps = list(zip(index, self.others, strict=True))
            yield Piece(
                self.target_begin + sum(number * axis.target for number, axis in steps),
                self.source_begin + sum(number * axis.source for number, axis in steps),
            )


def plan(
    shape: tuple[int, ...], target_strides: tuple[int, ...], source_strides: tuple[int, ...], itemsize: int
) -> Plan:
    """Return a plan to copy between arrays of a shape in few rectangles.

    Strides are in bytes, of any sign. The source's may be 0, as in a broadcast array.
    """
    if not math.prod(shape):
        return Plan(0, 0, 0, 0, 0, 0, (_Axis(0, 0, 0),))
    axes, target_begin, source_begin = _forward(zip(shape, target_strides, source_strides, strict=True))
    axes = _merged(axes)
    width = itemsize
    if axes and axes[-1].target == axes[-1].source == itemsize:
        width *= axes.pop().size
    rows = max((axis for axis in axes if _can_be_rows(axis, width)), default=None)
    if rows is None:
        rows = _Axis(1, width, width)
    else:
        axes.remove(rows)
    return Plan(width, rows.size, rows.target, rows.source, target_begin, source_begin, tuple(axes))


def _forward(axes: Iterator[tuple[int, int, int]]) -> tuple[list[_Axis], int, int]:
    """Return the axes longer than 1, reversed if both strides are negative, and where both arrays begin then."""
    found, target_begin, source_begin = [], 0, 0
    for size, target, source in axes:
        if size == 1:
            continue
        if target < 0 and source < 0:
            target_begin += (size - 1) * target
            source_begin += (size - 1) * source
            found.append(_Axis(size, -target, -source))
        else:
            found.append(_Axis(size, target, source))
    return found, target_begin, source_begin


def _merged(axes: list[_Axis]) -> list[_Axis]:
    """Return the fewest axes that reach the same elements, the innermost last."""
    merged: list[_Axis] = []
    for axis in sorted(axes, key=lambda each: (abs(each.target), abs(each.source)), reverse=True):
        outer = merged[-1] if merged else None
        if outer is not None and (outer.target, outer.source) == (axis.size * axis.target, axis.size * axis.source):
            merged[-1] = _Axis(outer.size * axis.size, axis.target, axis.source)
        else:
            merged.append(axis)
    return merged


def _can_be_rows(axis: _Axis, width: int) -> bool:
    """Return whether an axis can be CUDA's rows: they must not overlap or lie too far apart in either array."""
    return width <= min(axis.target, axis.source) and max(axis.target, axis.source) <= _MAX_PITCH
