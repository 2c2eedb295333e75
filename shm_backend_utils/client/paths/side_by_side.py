"""Calls of a model with a batcher, side by side in one region: the model then has their rows as one array."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ...dtypes import BYTES
from ...memory.pool.need import Need
from ...memory.pool.pool import SlotPool
from ...memory.pool.rows import Row
from ...protocol.call_layout import AnyInput, CallInput, CallLayout, rows_of
from ...protocol.layout import data_offset
from ..known_model import KnownModel
from ..once import Once
from ..settings import CallSettings
from ..steps import Steps
from .call import HostMemory
from .taking import take_at_once

__all__ = ["most_calls", "take_row"]

_MOST_CALLS: Final = 64


def most_calls(known: KnownModel, layout: CallLayout, max_batch_bytes: int) -> int:
    """Return how many calls like this may lie side by side; less than 2 for calls of which no batches are made."""
    if layout.batch_size is None or any(span.dtype is BYTES for span in layout.table.inputs.values()):
        return 0
    size = layout.end - known.data_begin
    most = min(_MOST_CALLS, max_batch_bytes // max(size, 1))
    return min(known.spec.max_batch_size // layout.batch_size, most)


def take_row(
    pool: SlotPool,
    once: Once,
    settings: CallSettings,
    known: KnownModel,
    layout: CallLayout,
    given: Mapping[str, AnyInput],
    wanted: Mapping[str, int | None] | None,
    *,
    is_expected: bool,
) -> Steps[Row[CallLayout] | None]:
    """Take memory for a call beside others like it; None if it shall have a region by itself.

    The layout is that in a region with one slot. A block is begun where others like the call are under way or will
    come, ``is_expected``, or came the last time, and where there is room for it now.
    """
    count = most_calls(known, layout, pool.options.max_batch_bytes)
    if count < 2:
        return None
    blocks, table = known.blocks, layout.table
    key = layout.requested, tuple(table.inputs.items()), tuple(table.outputs.items())

    def begin() -> Steps[HostMemory | None]:
        """Make a block, which goes with its memory; return that, or None if there is no room for it."""
        whole = known.lay_out(
            {name: _times(each, count) for name, each in given.items()},
            wanted and {name: None if size is None else size * count for name, size in wanted.items()},
            slot_count=count,
            is_one_request=False,
        )
        size = known.record_byte_size
        need = Need(whole.end - data_offset(count, size), count, size, "direct, side by side", known.kind)
        taken = yield from take_at_once(pool, settings, need)
        if taken is None:
            return None
        rows = layout.batch_size or 1
        parts = [rows_of(whole, known.spec, index * rows, (index + 1) * rows) for index in range(count)]
        blocks.begin(key, *taken, parts)
        return taken[1]

    row = blocks.take(key)
    may_begin = row is None and (is_expected or blocks.together == key)
    if row is None:
        blocks.together = None
    while row is None and may_begin:  # one call makes a block, and the others wait for a row of it
        block = yield from once.find((known, key), begin, settings.deadline)
        may_begin = block is not None
        row = blocks.take(key)
    return row


def _times(each: AnyInput, count: int) -> CallInput:
    return CallInput(each.dtype, (each.shape[0] * count, *each.shape[1:]), each.byte_size * count, each.device)
