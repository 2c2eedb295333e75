"""What a client has learned of a model, and what it has warned of: its configuration, sizes of outputs, its path."""

from __future__ import annotations

import logging
import time
import warnings
import weakref
from collections.abc import Mapping
from typing import Any, Final

from ..errors import TensorError
from ..memory.kinds import RegionKind
from ..memory.pool.rows import RowBlocks
from ..model_spec import ModelSpec
from ..origin import Origin
from ..protocol.call_layout import NO_DEVICES, AnyInput, CallLayout, LearnedSizes, lay_out, record_byte_size
from ..protocol.layout import data_offset
from .explanation import Check, Explanation
from .steps import Send, Steps
from .transports.messages import Codec

__all__ = ["Catalog", "CopyWarning", "KnownModel", "tell_gpu_copy", "tell_no_growth", "tell_overflow", "tell_path"]

_LOG: Final = logging.getLogger(__name__)

_SECOND_LOOK_S: Final = 30.0
_ANY_BATCH_SIZE: Final = 2**31
_BEST: Final = "direct"


class KnownModel:
    """One model in one version, as the server described it."""

    def __init__(self, spec: ModelSpec, head_room: float, version: str = "") -> None:
        self.spec = spec
        self.version = version  # as its calls ask for it; empty if the server chooses
        self.record_byte_size = record_byte_size(spec)  # enough for any call of it
        self.refusals: dict[str, str] = {}  # paths that turned out to be closed, with what was said
        self.kind = RegionKind.SYSTEM  # of regions for its calls on the direct path
        self.sealed: Check | None = None  # whether it can fetch sealed memory; None until that was tried
        self.explanation: Explanation | None = None  # None until somebody has found out
        self.path: str | None = None  # the one that the explanation has
        self.inline_end = 0  # up to where the tensors of a call with one slot may end so that it goes in band
        self.reason = ""  # why its calls take no better path, as it was found last
        self.told: set[str] = set()  # which copies the user was told of: one entry for each path, and each output
        self.seen = time.monotonic()  # when the server was asked last
        self.data_begin = data_offset(1, self.record_byte_size)  # in a region with one slot
        self.learned = LearnedSizes(head_room)  # of outputs that found too little room
        self.blocks: RowBlocks[CallLayout] = RowBlocks()  # of calls that lie side by side
        # The direct call that was begun last, and its layout in a region by itself.
        self.last: tuple[weakref.ref[Any], CallLayout] | None = None
        self.is_short_of_memory = False  # whether a call was told to go inline, as the machine has no memory for it

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
        """Lay a call out in a region with so many slots; TensorError if the model does not take these tensors."""
        return lay_out(
            self.spec,
            inputs,
            wanted,
            self.data_begin if slot_count == 1 else data_offset(slot_count, self.record_byte_size),
            learned=self.learned.per_row if learned is None else learned,
            most_rows=self.spec.max_batch_size if is_one_request else _ANY_BATCH_SIZE,
            output_devices=output_devices,
        )

    def refuses(self, inputs: Mapping[str, AnyInput], wanted: Mapping[str, int | None] | None, path: str) -> bool:
        """Return whether the model certainly does not run for such a call on such a path."""
        if self.spec.paths is not None and path not in self.spec.paths:
            return True
        try:
            self.lay_out(inputs, wanted)
        except TensorError:
            return True
        return False

    @property
    def is_worth_another_look(self) -> bool:
        """Whether its calls might take a better path, had its configuration changed meanwhile."""
        return self.path not in (None, _BEST) and time.monotonic() - self.seen > _SECOND_LOOK_S


class Catalog:
    """The models that a client has called."""

    codec: Codec  # from the first connection on

    def __init__(self, head_room: float) -> None:
        self._head_room = head_room
        self.known: dict[tuple[str, str], KnownModel] = {}

    def recall(self, model: str, version: str) -> KnownModel | None:
        """Return a model that was looked up before, unless it is time to look again."""
        known = self.known.get((model, version))
        return None if known is None or known.is_worth_another_look else known

    def look_up(self, model: str, version: str, timeout_s: float) -> Steps[KnownModel]:
        """Ask the server for a model, and return it; the same object as before if nothing has changed."""
        asked = time.monotonic()
        answer = yield Send(self.codec.ask("model config", model, version), timeout_s)
        spec = ModelSpec.of_server(model, self.codec.told(answer))
        known = self.known.get((model, version))
        if known is None or known.spec != spec:
            if known is not None:
                _LOG.info("model %r has another configuration now", model)
            known = self.known[model, version] = KnownModel(spec, self._head_room, version)
        known.seen = asked
        return known

    @property
    def reasons(self) -> dict[str, str]:
        """For each model: which path its calls take, and why not a better one."""
        found = [(known.spec.name, known.explanation) for known in list(self.known.values())]
        return {name: f"{why.path}: {why.reason}" for name, why in found if why is not None}

    def drop(self, known: KnownModel) -> None:
        """Forget one model, which has turned out to be another than it was."""
        for key, each in list(self.known.items()):
            if each is known:
                self.known.pop(key, None)

    def forget_with(self, known: KnownModel) -> bool:
        """Forget all models, if this one is among them, as the server may have others by now; return whether it is."""
        is_there = known in self.known.values()
        if is_there:
            self.known.clear()
        return is_there


_COPIES: Final[Mapping[str, str]] = {
    "triton-shm": "which copies its inputs once and its outputs twice",
    "inline": "which copies every tensor several times",
}

_FROM_BYTES: Final = 64 * 2**10
"""From this size on a copy takes longer than what a call takes anyway."""


class CopyWarning(UserWarning):
    """Tensors are copied that need not be; the message says why, and what to do about it.

    It comes once for each model and reason, where a call leaves the choice to the library, and from 64 KiB on: what is
    smaller is copied in no time. If that is meant, ask for the path by name, or silence the warning:
    ``warnings.simplefilter("ignore", CopyWarning)``.
    """


def tell_path(known: KnownModel, path: str, why: str, byte_size: float, origin: Origin) -> None:
    """Warn that a call does not take the direct path, though it might take any; ``why`` says what it lacks."""
    if byte_size >= _FROM_BYTES:
        message = f"is called on the path {path}, {_COPIES[path]}: {why}; if that is meant, say path={path!r}"
        _warn(known, f"path {path}", f"model {known.spec.name!r} {message}", origin)


def tell_gpu_copy(known: KnownModel, name: str, obstacle: str, origin: Origin) -> None:
    """Warn that an input is copied on its GPU, as it cannot be used where it is; ``obstacle`` says why."""
    message = f"input {name!r} of model {known.spec.name!r} is copied on its GPU: {obstacle}"
    _warn(known, f"input {name}: {obstacle}", message, origin)


def tell_overflow(known: KnownModel, overflowed: Mapping[str, int], remedy: str, origin: Origin) -> None:
    """Warn that outputs found too little room in shared memory."""
    for name, byte_size in overflowed.items():
        if byte_size >= _FROM_BYTES:
            message = (
                f"output {name!r} of model {known.spec.name!r} needs {byte_size} bytes and found less room in shared "
                f"memory, so it came back through Triton, which copies it; {remedy}: outputs={{{name!r}: {byte_size}}}"
            )
            _warn(known, f"output {name}", message, origin)


def tell_no_growth(known: KnownModel, rooms: Mapping[str, int], origin: Origin) -> None:
    """Warn that outputs of a prepared call go on to find too little room, as there is no memory to be had for them."""
    byte_size = sum(rooms.values())
    if byte_size >= _FROM_BYTES:
        message = (
            f"a prepared call of model {known.spec.name!r} has too little room for {', '.join(map(repr, rooms))}, and "
            f"the pool has no {byte_size} bytes now, so they come back through Triton, which copies them, until it "
            "has; release results sooner, raise PoolOptions(max_bytes=...), or say beforehand: "
            f"outputs={dict(rooms)}"
        )
        _warn(known, "no memory to grow", message, origin)


def _warn(known: KnownModel, what: str, message: str, origin: Origin) -> None:
    if what not in known.told:
        known.told.add(what)
        warnings.warn_explicit(message, CopyWarning, origin.code.co_filename, origin.line, registry=None)
