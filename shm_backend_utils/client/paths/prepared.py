"""A call on the direct path that the user fills and makes again and again; its room for outputs grows as they do."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from ...dtypes import BYTES
from ...errors import TensorError
from ...protocol.call_layout import aligned
from ...protocol.refusals import code_in
from ...protocol.spans import InputSpan, OutputSpan
from ...tensors.strings import Strings
from ..errors import InferenceError
from ..result import Result
from ..settings import left_until
from ..steps import Steps
from .buffers import RegionBuffer
from .direct import DirectCall

__all__ = ["PreparedDirectCall"]

_GONE: Final = "shm:gone"
_NOT_MAPPED: Final = frozenset({_GONE, "shm:refused", "shm:machine"})


@dataclass(eq=False, repr=False)
class PreparedDirectCall(DirectCall):
    """A call whose inputs the user fills. Strings are objects there, and become bytes with each request.

    The user has arrays over the inputs, so they stay where they are. Outputs that found no room get some in a second
    region, the overflow, which the call's slot fences, too.
    """

    lacking: Mapping[str, int] = field(default_factory=dict, init=False)  # outputs without room, their bytes
    _filled: dict[str, Any] | None = field(default=None, init=False)
    _overflow: RegionBuffer | None = field(default=None, init=False)
    _rooms: Mapping[str, int] = field(default_factory=dict, init=False)  # of the overflow
    _grows: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        self._first = self.layout, self.buffers

    def arrays(self) -> dict[str, Any]:
        if self._filled is None:
            self._filled = super().arrays()
        return dict(self._filled)

    def send(self, timeout_s: float) -> Steps[Result]:
        self._check_is_open()
        for name, span in self.layout.table.inputs.items():
            if span.dtype is BYTES:
                self._write_strings(name, span)
        deadline = time.monotonic() + timeout_s
        result: Result | None = None
        try:
            result = yield from super().send(left_until(deadline))
        except InferenceError as error:
            if not self._drops_overflow(error):
                raise
        if result is None:
            result = yield from super().send(left_until(deadline))
        if (result.overflowed or self.lacking) and self._grows:
            rooms = self._first[0].table.outputs
            on_host = {name for name, room in rooms.items() if not room.region}
            self.lacking = {name: size for name, size in result.overflowed.items() if name in on_host}
        return result

    def rooms(self, learned: Mapping[str, int]) -> dict[str, int]:
        """Return how many bytes of an overflow outputs should have; ``learned`` is what they need for each row."""
        rows = self.layout.batch_size or 1
        return {name: max(size, learned.get(name, 0) * rows) for name, size in {**self._rooms, **self.lacking}.items()}

    def extend(self, overflow: RegionBuffer, rooms: Mapping[str, int]) -> None:
        """Have an overflow instead of the one before, with so many bytes for these outputs."""
        self._use(overflow, rooms)
        self.lacking = {}
        if self.is_closed:  # meanwhile
            self.close()

    def close(self) -> None:
        super().close()
        self._first = self.layout, ()
        self._filled = {}
        self.lacking = {}
        self._overflow = None

    def _drops_overflow(self, error: InferenceError) -> bool:
        """Do without the overflow, if a request may have been refused as no model could map it; return whether so."""
        code = code_in(str(error))
        if self._overflow is None or code not in _NOT_MAPPED or not self.did_not_start(error):
            return False
        self._grows = code == _GONE
        self._overflow.region.spoil("refusal")
        self._use(None, {})
        return True

    def _check_memory_was_opened(self, error: InferenceError) -> None:
        if self._overflow is None:  # else it goes out again without that: it may be the other memory
            super()._check_memory_was_opened(error)

    def _use(self, overflow: RegionBuffer | None, rooms: Mapping[str, int]) -> None:
        """Lay the outputs out anew."""
        layout, buffers = self._first
        if overflow is not None:
            table, outputs = layout.table, dict(layout.table.outputs)
            buffers = (*buffers, overflow)
            offset = overflow.region.data_offset
            for name, byte_size in rooms.items():
                outputs[name] = OutputSpan(len(buffers), offset, byte_size)
                offset = aligned(offset + byte_size)
            layout = layout._replace(table=table._replace(outputs=outputs, regions=(*table.regions, overflow.claim)))
        self.layout, self.buffers, self._overflow, self._rooms = layout, buffers, overflow, rooms

    def _write_strings(self, name: str, span: InputSpan) -> None:
        encoded = Strings.of(name, self.arrays()[name]).encoded
        if encoded.nbytes > span.byte_size:
            raise TensorError(
                name,
                f"the strings of input {name!r} take {encoded.nbytes} bytes, but the call was prepared for "
                f"{span.byte_size}; describe them as (shape, 'S100') if 100 is the length of the longest",
            )
        self.memory[span.offset : span.offset + encoded.nbytes] = encoded
