"""A client's knowledge of a model: the configuration, outputs' sizes, the path, and the warnings already given."""

from __future__ import annotations

import math
import time
import warnings
import weakref
from collections.abc import Mapping
from typing import Any, Final

from ..dtypes import BYTES
from ..memory.managed import RegionKind
from ..memory.pool.rows import RowBlocks
from ..model_spec import ModelSpec
from ..process import Origin
from ..protocol.call_layout import NO_DEVICES, AnyInput, CallLayout, LearnedSizes, lay_out, record_byte_size
from ..protocol.layout import data_offset
from ..protocol.table import TensorForm, room_part
from .explanation import Check, Explanation

__all__ = ["COPIES_MATTER", "CopyWarning", "KnownModel"]

_SECOND_LOOK_S: Final = 30.0
_ANY_BATCH_SIZE: Final = 2**31
_BEST: Final = "direct"
_COPIES: Final[Mapping[str, str]] = {
    "triton-shm": "which copies its inputs once and its outputs twice",
    "inline": "which copies every tensor several times",
}
COPIES_MATTER: Final = 64 * 2**10
"""From this size on, a copy takes longer than the rest of a call."""


class CopyWarning(UserWarning):
    """Tensors are copied that need not be; the message says why, and how to avoid it.

    It comes once for each model and reason, if a call leaves the choice of the path to the client, and only from 64 KiB
    on: smaller copies take almost no time. If you accept the copy, name the path in the call, or silence the warning:
    ``warnings.simplefilter("ignore", CopyWarning)``.
    """


class KnownModel:
    """One model in one version, as the server described it."""

    def __init__(self, spec: ModelSpec, head_room: float, version: str = "") -> None:
        self.spec = spec
        # For tensors of numbers, the constant parts of tables (inputs, and rooms for outputs) and of results (outputs).
        self.inputs, self.outputs = TensorForm.of_all(spec.inputs), TensorForm.of_all(spec.outputs)
        self.rooms = {name: room_part(name) for name in self.outputs}
        self.version = version  # the version that calls ask for; empty if the server chooses
        # Inline, strings may crash a stub that was built for another NumPy.
        self.has_strings = any(each.dtype is BYTES for each in (*spec.inputs.values(), *spec.outputs.values()))
        self.record_byte_size = record_byte_size(spec)  # enough for any call of the model
        self.refusals: dict[str, str] = {}  # paths that failed in a call, with the reasons
        self.kind = RegionKind.SYSTEM  # the kind of regions for direct calls
        self.sealed: Check | None = None  # whether the model can fetch sealed memory; None before the check
        self.explanation: Explanation | None = None  # None before the first call's checks
        self.path: str | None = None  # the explanation's path
        self.inline_end = 0  # a call with one slot goes inline if its tensors end here or before
        self.open_paths: frozenset[str] = frozenset()  # the paths without a known obstacle
        self.reason = ""  # why calls take no better path, by the last checks
        self.warned: set[str] = set()  # copies that the user was warned of: an entry for each path and output
        self.seen = time.monotonic()  # when the client last asked the server for the model
        self.data_begin = data_offset(1, self.record_byte_size)  # where the data begin in a region with one slot
        self.learned = LearnedSizes(head_room)  # sizes of outputs that found too little room
        self.blocks: RowBlocks[CallLayout] = RowBlocks()  # blocks of rows that similar calls share
        # The latest direct call, and the layout that it would have in a region of its own; None if it has that layout.
        self.last: tuple[weakref.ref[Any], CallLayout | None] | None = None

    def lay_out(
        self,
        inputs: Mapping[str, AnyInput],
        wanted: Mapping[str, int | None] | None,
        *,
        output_devices: Mapping[str, int] = NO_DEVICES,
        slot_count: int = 1,
        is_one_request: bool = True,
        learned: Mapping[str, int] | None = None,
    ) -> CallLayout:
        """Lay out a call in a region of ``slot_count`` slots; TensorError if the model does not take these tensors."""
        return lay_out(
            self.spec,
            inputs,
            wanted,
            self.data_begin if slot_count == 1 else data_offset(slot_count, self.record_byte_size),
            learned=self.learned.per_row if learned is None else learned,
            most_rows=self.spec.max_batch_size if is_one_request else _ANY_BATCH_SIZE,
            output_devices=output_devices,
        )

    @property
    def is_worth_another_look(self) -> bool:
        """Whether to ask the server again: a changed configuration might open a better path for calls."""
        return self.path not in (None, _BEST) and time.monotonic() - self.seen > _SECOND_LOOK_S

    def warn(self, what: str, message: str, origin: Origin, byte_size: float = math.inf) -> None:
        """Warn of a copy, once for each ``what``, unless ``byte_size`` is small."""
        if byte_size >= COPIES_MATTER and what not in self.warned:
            self.warned.add(what)
            warnings.warn_explicit(message, CopyWarning, origin.code.co_filename, origin.line, registry=None)

    def warn_of_path(self, path: str, why: str, byte_size: float, origin: Origin) -> None:
        """Warn that a call whose user left the path open does not take the direct one; ``why`` names the obstacle."""
        message = f"is called on the path {path}, {_COPIES[path]}: {why}; to accept that, give path={path!r}"
        self.warn(f"path {path}", f"model {self.spec.name!r} {message}", origin, byte_size)

    def warn_of_overflow(self, overflowed: Mapping[str, int], remedy: str, origin: Origin) -> None:
        for name, byte_size in overflowed.items():
            message = (
                f"output {name!r} of model {self.spec.name!r} needs {byte_size} bytes and found less room in shared "
                f"memory, so it came back through Triton, which copies it; {remedy}: outputs={{{name!r}: {byte_size}}}"
            )
            self.warn(f"output {name}", message, origin, byte_size)
