"""Calls of a model with a batcher, side by side in one region: the model then has their rows as one array."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ...dtypes import BYTES
from ...memory.pool.need import Need
from ...memory.pool.rows import Row, RowBlocks
from ...protocol.call_layout import AnyInput, CallInput, CallLayout, rows_of
from ...protocol.layout import data_offset
from ..known_model import KnownModel
from ..once import Once
from ..settings import CallSettings
from ..steps import Steps
from .direct import DirectExchange
from .taking import Memory, Taking

__all__ = ["SideBySide"]

_MOST_CALLS: Final = 64


class SideBySide:
    """Has alike calls of one client lie side by side, in ``max_batch_bytes`` of its memory at once."""

    def __init__(self, taking: Taking, max_batch_bytes: int) -> None:
        self._taking = taking
        self._max_batch_bytes = max_batch_bytes
        self._blocks: RowBlocks[CallLayout] = RowBlocks()
        self._once = Once()

    def most_calls(self, known: KnownModel, layout: CallLayout) -> int:
        """Return how many calls like this may lie side by side; less than 2 for calls of which no batches are made."""
        if layout.batch_size is None or any(span.dtype is BYTES for span in layout.table.inputs.values()):
            return 0
        size = layout.end - known.data_begin
        most = min(_MOST_CALLS, self._max_batch_bytes // max(size, 1))
        return min(known.spec.max_batch_size // layout.batch_size, most)

    def take(
        self,
        settings: CallSettings,
        known: KnownModel,
        layout: CallLayout,
        given: Mapping[str, AnyInput],
        wanted: Mapping[str, int | None] | None,
        count: int,
        *,
        is_kept: bool,
    ) -> Steps[Row[CallLayout]]:
        """Take memory for a call: beside others like it, if there are such and there is room; else by itself.

        The layout is that in a region with one slot; ``count`` calls may lie side by side. Where the user keeps the
        memory for more requests than one, ``is_kept``, others like it will come. Raises what :meth:`.Taking.take` does.
        """
        table = layout.table
        spans = tuple(table.inputs.items()), tuple(table.outputs.items())
        key = (settings.model, settings.version, layout.requested, *spans)
        if is_kept:
            self._blocks.expect(key)

        def begin() -> Steps[Memory | None]:
            """Make a block, which goes with its memory; return that, or None if there is no room for it."""
            whole = known.lay_out(
                {name: _times(each, count) for name, each in given.items()},
                wanted and {name: None if size is None else size * count for name, size in wanted.items()},
                slot_count=count,
                is_one_request=False,
            )
            size = known.record_byte_size
            need = Need(whole.end - data_offset(count, size), count, size, "direct, side by side", known.kind)
            taken = yield from self._taking.take_at_once(settings, need)
            if taken is None:
                return None
            rows = layout.batch_size or 1
            parts = [rows_of(whole, known.spec, index * rows, (index + 1) * rows) for index in range(count)]
            self._blocks.begin(key, *taken, parts)
            return taken[1]

        row = self._blocks.take(key)
        may_begin = row is None and self._blocks.is_wanted(key)
        while row is None and may_begin:  # one call makes a block, and the others wait for a row of it
            block = yield from self._once.find(key, begin, settings.deadline)
            may_begin = block is not None
            row = self._blocks.take(key)
        if row is None:
            region, memory = yield from self._taking.take(settings, known, layout.end, 1, DirectExchange.path)
            self._blocks.note_alone(key, memory)
            if region.data_offset != known.data_begin:
                layout = layout.moved(region.data_offset - known.data_begin)
            row = Row(region, region.slots[0], layout, memory)
        return row


def _times(each: AnyInput, count: int) -> CallInput:
    return CallInput(each.dtype, (each.shape[0] * count, *each.shape[1:]), each.byte_size * count, each.device)
