"""Streams: a request to a decoupled model, and its responses one after another."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from ..errors import BudgetError, NoSharedMemoryError, PeerError
from ..protocol.call_layout import AnyInput, CallInput
from ..telling import telling
from .copy_warnings import tell_overflow, tell_path
from .core import Core
from .errors import DeadlineExceededError, ForkedError, PathUnavailableError, stream_held
from .inputs.descriptions import Outputs, wanted_outputs
from .inputs.devices import inputs_on_gpus, library_of_inputs
from .inputs.sources import sources
from .known_model import KnownModel
from .opening import inline_instead
from .paths.call import COPYING, check_sequence_id, write_inputs
from .paths.inline import InlineCall
from .paths.staging import brought_to_gpus, can_be_downloaded
from .paths.stream import FEW_FRAMES, USUAL_FRAMES, DirectStream, check_frames, guessed_rooms, ring_end
from .paths.taking import take
from .result import Result
from .settings import CallSettings
from .steps import Steps, forget_locals, offloaded

__all__ = ["OpenStream", "holding_told", "on_their_gpus", "open_stream", "responses_of"]

_REMEDY: Final = "later streams have room for as much; say it beforehand"
_ONE_RESPONSE: Final = "a stream needs a decoupled model on the direct path; ask by infer() for its one response"


@dataclass(slots=True, eq=False)
class OpenStream:
    """A stream that has its memory."""

    settings: CallSettings
    patience_s: float  # how long to wait for a response
    known: KnownModel
    call: DirectStream | InlineCall
    output_devices: Mapping[str, int]
    library: str | None = None  # whose arrays outputs on GPUs are
    bytes_avoided: int = 0  # so far


def open_stream(
    core: Core,
    settings: CallSettings,
    inputs: Mapping[str, Any],
    outputs: Outputs,
    frames: int | None,
    patience_s: float,
) -> Steps[OpenStream]:
    """Take memory for a request to a decoupled model, and for its responses; copy the inputs there.

    Triton's own shared memory has no room for more than one response.
    """
    if core.is_forked:
        raise ForkedError("this stream")
    settings = settings._replace(deadline=time.monotonic() + patience_s)
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
                    raise  # else as many frames as large as those of an earlier stream find no room
                call = yield from _open_ring(core, settings, known, on_host, wanted, frames, {})
        except NoSharedMemoryError as error:
            yield from inline_instead(core, settings, known, error)
    elif settings.path not in ("auto", InlineCall.path):
        raise PathUnavailableError(
            f"a stream of model {known.spec.name!r} cannot take the path {settings.path!r}: "
            "triton-shm has room for one response, and direct needs a decoupled model"
        )
    if call is None:
        yield from core.paths.choose(known, InlineCall.path, settings.deadline)
        if settings.path == "auto" and not needs_ring:  # else it was told that there is no memory
            why = _ONE_RESPONSE if path == DirectStream.path else known.reason
            byte_size = sum(source.byte_size for source in given.values())
            tell_path(known, InlineCall.path, why, byte_size, settings.origin)
        call = InlineCall(core.codec, settings, known, known.lay_out(on_host, wanted), wanted, devices)
    try:
        on_gpus = inputs_on_gpus(given)
        if on_gpus:
            yield from can_be_downloaded(on_gpus, settings.named, settings.deadline)
            yield from offloaded(lambda: call.write(given), settings.left_s, COPYING)
        else:
            yield from write_inputs(call, given, settings)
    except BaseException:
        call.close()
        raise
    library = settings.library or library_of_inputs(on_gpus)
    return OpenStream(settings, patience_s, known, call, devices, library)


def _open_ring(
    core: Core,
    settings: CallSettings,
    known: KnownModel,
    given: Mapping[str, AnyInput],
    wanted: Mapping[str, int | None] | None,
    frames: int | None,
    learned: Mapping[str, int],
) -> Steps[DirectStream]:
    """Take memory for a stream; ``learned`` is how large its outputs may be expected to be."""
    count, most_bytes = frames or USUAL_FRAMES, core.stream_guess_bytes
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


def holding_told(stream: OpenStream) -> telling[DeadlineExceededError]:
    """Where no response came in time as the user holds all of a stream's memory, say so."""

    def meaning(_: DeadlineExceededError) -> BaseException | None:
        is_held = isinstance(stream.call, DirectStream) and stream.call.is_held
        return stream_held(stream.known.spec.name) if is_held else None

    return telling(DeadlineExceededError, meaning)


def responses_of(core: Core, stream: OpenStream, answer: Any) -> list[Result]:
    """Return the results of a stream's next answer, one or none. The caller alone holds what is in the list.

    The client learns how large outputs were that found too little room: its next stream has as much.
    """
    try:
        result = stream.call.result(answer)
    except BaseException as error:
        if isinstance(error, PeerError):
            core.catalog.drop(stream.known)
        forget_locals(error)
        raise
    if result.overflowed:
        known = stream.known
        known.learned.learn(result.overflowed, stream.call.layout.batch_size or 1)
        tell_overflow(known, result.overflowed, _REMEDY, stream.settings.origin)
    stream.bytes_avoided += result.bytes_avoided
    # Triton ends some streams by a response without outputs.
    return [result] if stream.call.path != InlineCall.path or result else []


def on_their_gpus(core: Core, stream: OpenStream, results: list[Result]) -> Steps[None]:
    """Bring a stream's results to the GPUs that their outputs are wanted on, in the list, which alone holds them."""
    for index in range(len(results)):
        results[index] = yield from brought_to_gpus(
            core.gpus, results[index], stream.output_devices, stream.library, stream.patience_s
        )
