"""Streams: a request to a decoupled model, and its responses, on the direct path in a ring of frames."""

from __future__ import annotations

import functools
import operator
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, SupportsIndex

import numpy as np

from ..errors import BudgetError, CallerError, ClosedError, NoSharedMemoryError, PeerError
from ..memory.pool.slot import Memory, SlotRegion
from ..model_spec import ModelSpec
from ..protocol import results
from ..protocol.call_layout import ALIGNMENT, AnyInput, CallInput, CallLayout
from ..protocol.spans import MAX_FRAMES, Ring, frame_number
from ..protocol.table import encode
from .core import Core, inline_instead
from .errors import DeadlineExceededError, ForkedError, PathUnavailableError, stream_held
from .inputs.devices import inputs_on_gpus, library_of_inputs
from .inputs.sources import Outputs, sources, wanted_outputs
from .known_model import KnownModel
from .paths.call import InRegion, check_sequence_id, write_inputs
from .paths.direct import result_of, usual_result
from .paths.on_gpus import brought_to_gpus, can_be_downloaded
from .paths.taking import take
from .paths.triton_shm import InlineCall
from .result import Result
from .settings import CallSettings
from .steps import Steps
from .transports.messages import Codec

__all__ = ["DirectStream", "OpenStream", "guessed_rooms", "open_stream"]

USUAL_FRAMES: Final = 8
FEW_FRAMES: Final = 4
"""The number of frames if they are large. A model whose next frame is not free waits 0.1 milliseconds or more."""


def check_frames(spec: ModelSpec, frames: SupportsIndex | None) -> int | None:
    """Return the number of a ring's frames, None if not given; CallerError if the stream cannot have so many."""
    if frames is None:
        return None
    if not spec.is_decoupled:
        raise CallerError(
            f"frames is {frames!r}, but model {spec.name!r} is not decoupled: its stream has one response; leave "
            "frames out, or use infer()"
        )
    try:
        count = operator.index(frames)
    except TypeError:
        count = 0
    if not 1 <= count <= MAX_FRAMES:
        raise CallerError(f"frames is {frames!r}; expected a whole number, 1 to {MAX_FRAMES}")
    return count


def ring_end(layout: CallLayout, frames: int) -> int:
    """Return where a stream's last tensor ends in its region, behind the inputs and all frames."""
    return layout.end + (frames - 1) * _stride(layout)


def guessed_rooms(layout: CallLayout, frames: int, most_bytes: int) -> dict[str, int]:
    """Return bytes per row for outputs of a stream that would have no room, because their size is still unknown."""
    unknown = [name for name, room in layout.table.outputs.items() if not room.byte_size and name not in layout.certain]
    if not unknown:
        return {}
    share = most_bytes // (frames * len(unknown) * (layout.batch_size or 1))
    return dict.fromkeys(unknown, share & -ALIGNMENT)


@dataclass(eq=False, repr=False)
class DirectStream(InRegion):
    """One request to a decoupled model. The first slot of its region holds the request, the others the frames."""

    codec: Codec
    settings: CallSettings
    known: KnownModel
    layout: CallLayout
    region: SlotRegion
    memory: Memory

    path = "direct"

    def __post_init__(self) -> None:
        layout = self.layout
        self._slot, *self._frames = self.region.slots
        ring = Ring(1, len(self._frames), _stride(layout))
        self.layout = layout._replace(table=layout.table._replace(ring=ring))
        self._index = 0
        self._released: dict[int, weakref.ref[Memory]] = {}
        ends = [span.offset + span.byte_size for span in layout.table.inputs.values()]
        self._inputs_end = max(ends, default=self.region.data_offset)

    def message(self) -> Any:
        """Begin the request, and return its message."""
        layout, name = self.layout, self.known.spec.name
        generation = self._slot.begin(encode(layout.table))
        return self.codec.infer(
            name,
            self.settings.options,
            outputs=layout.requested,
            batch_size=layout.batch_size,
            slot=(self._slot.address_pattern % name, generation),
        )

    def result(self, answer: Any) -> Result:
        """Return the outputs of the next response; PeerError if the model has not written its frame as it must."""
        place = self._index % len(self._frames)
        number = frame_number(self._slot.sent, self._index)
        frame = self._frames[place]
        # The result's arrays must keep `memory`. NumPy would make them keep self.memory, hence the memoryview.
        memory, end, spec = np.frombuffer(self.memory.data, np.uint8), self.region.data_end, self.known.spec
        wanted, response = self.layout.table.outputs, functools.partial(self.codec.result, answer)
        result = usual_result(self.known, frame, number, memory, self._inputs_end, end, wanted, response, 0)
        if result is None:
            data = bytes(frame.results)
            if not data:
                raise ClosedError("this client")
            places, *_ = results.decode(data, (end,), self.region.data_offset, spec, number)
            result = result_of(places, memory, (), response, inputs_end=self._inputs_end)
        self._released[place] = weakref.ref(memory, lambda _: frame.release_frame(number))
        self._index += 1
        return result

    @property
    def is_held(self) -> bool:
        """Whether the user holds every frame, so that the model has no place for its next response."""
        return len(self._released) == len(self._frames) and all(
            memory() is not None for memory in self._released.values()
        )

    def close(self) -> None:
        if not self.is_closed:
            self._slot.give_up()
        self.is_closed = True
        self.memory = np.empty(0, np.uint8)


def _stride(layout: CallLayout) -> int:
    """Return the bytes from one frame to the next: the outputs, which lie behind the inputs, up to an aligned end."""
    return layout.end - min((span.offset for span in layout.table.outputs.values()), default=layout.end)


_REMEDY: Final = "later streams have room for as much; to give it at once, list it with the other outputs that you want"
_ONE_RESPONSE: Final = "a stream needs a decoupled model on the direct path; ask by infer() for its one response"


@dataclass(slots=True, eq=False)
class OpenStream:
    """A stream with its memory. A context manager: leaving it gives the memory back and counts the call."""

    core: Core
    timeout_s: float  # how long to wait for a response
    call: DirectStream | InlineCall
    output_devices: Mapping[str, int]
    library: str | None  # the library whose arrays hold outputs on GPUs
    bytes_avoided: int = 0  # so far

    def results(self, answer: Any) -> Steps[list[Result]]:
        """Return the next result, if any, in a list that only the caller keeps; learn the sizes of its outputs."""
        call, known = self.call, self.call.known
        try:
            result = call.result(answer)
        except PeerError:
            self.core.drop(known)
            raise
        if result.overflowed:
            known.learned.learn(result.overflowed, call.layout.batch_size or 1)
            known.warn_of_overflow(result.overflowed, _REMEDY, call.settings.origin)
        self.bytes_avoided += result.bytes_avoided
        if self.output_devices:
            deadline = time.monotonic() + self.timeout_s
            result = yield from brought_to_gpus(self.core.gpus, result, self.output_devices, self.library, deadline)
        # Triton ends some streams by a response without outputs.
        return [result] if call.path != InlineCall.path or result else []

    def __enter__(self) -> OpenStream:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        call = self.call
        is_held = isinstance(error, DeadlineExceededError) and isinstance(call, DirectStream) and call.is_held
        del error, trace  # the error raised below keeps this frame, and so these
        call.close()
        if kind is None:
            self.core.tally.succeeded(call.path, self.bytes_avoided)
        else:
            self.core.tally.failed()
        if is_held:  # the user held all frames, so no response came in time
            raise stream_held(call.known.spec.name) from None


def open_stream(
    core: Core,
    settings: CallSettings,
    inputs: Mapping[str, Any],
    outputs: Outputs,
    frames: int | None,
    timeout_s: float,
) -> Steps[OpenStream]:
    """Take memory for a request to a decoupled model, and for its responses; copy the inputs there."""
    if core.is_forked:
        raise ForkedError("this stream")
    settings = settings._replace(deadline=time.monotonic() + timeout_s)
    wanted, devices = wanted_outputs(outputs)
    known, given = yield from core.fitting(settings, lambda known: sources(known.spec, inputs, core.on_gpus))
    on_host = {name: CallInput(each.dtype, each.shape, each.byte_size) for name, each in given.items()}
    path = yield from core.paths.choose(known, settings.path, settings.deadline)
    frames = check_frames(known.spec, frames)
    check_sequence_id(known.spec, settings.options)
    call: DirectStream | InlineCall | None = None
    needs_ring = path == DirectStream.path and known.spec.is_decoupled
    if needs_ring:
        try:
            try:
                call = yield from _open_ring(core, settings, known, on_host, wanted, frames, known.learned.per_row)
            except (BudgetError, NoSharedMemoryError):
                if not known.learned.per_row:
                    raise  # else frames of the learned sizes are too large: guess smaller ones
                call = yield from _open_ring(core, settings, known, on_host, wanted, frames, {})
        except NoSharedMemoryError as error:
            yield from inline_instead(core, settings, known, error)
    elif path != InlineCall.path and (settings.path != "auto" or known.has_strings):
        raise PathUnavailableError(f"model {known.spec.name!r} cannot stream on the path {path!r}: {_ONE_RESPONSE}")
    if call is None:
        yield from core.paths.choose(known, InlineCall.path, settings.deadline)
        if settings.path == "auto" and not needs_ring:  # else inline_instead() has logged a warning
            why = _ONE_RESPONSE if path == DirectStream.path else known.reason
            byte_size = sum(source.byte_size for source in given.values())
            known.warn_of_path(InlineCall.path, why, byte_size, settings.origin)
        call = InlineCall(core.codec, settings, known, known.lay_out(on_host, wanted), wanted, devices)
    try:
        on_gpus = inputs_on_gpus(given)
        yield from can_be_downloaded(on_gpus, settings.named, settings.deadline)
        yield from write_inputs(call, given, settings)
    except BaseException:
        call.close()
        raise
    library = settings.library or library_of_inputs(on_gpus)
    return OpenStream(core, timeout_s, call, devices, library)


def _open_ring(
    core: Core,
    settings: CallSettings,
    known: KnownModel,
    given: Mapping[str, AnyInput],
    wanted: Mapping[str, int | None] | None,
    frames: int | None,
    learned: Mapping[str, int],
) -> Steps[DirectStream]:
    """Take memory for a stream; ``learned`` has the bytes per row that earlier outputs needed."""
    count, most_bytes = frames or USUAL_FRAMES, core.pool.stream_guess_bytes
    layout = known.lay_out(given, wanted, slot_count=1 + count, learned=learned)
    is_large = frames is None and ring_end(layout, count) > most_bytes
    if is_large:
        count = FEW_FRAMES
    guesses = guessed_rooms(layout, count, most_bytes)
    if guesses or is_large:
        layout = known.lay_out(given, wanted, slot_count=1 + count, learned={**guesses, **learned})
    region, memory = yield from take(
        core.pool, settings, known, ring_end(layout, count), 1 + count, f"a stream of {count}"
    )
    return DirectStream(core.codec, settings, known, layout, region, memory)
