"""Streams: a request to a decoupled model, and its responses one after another."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from ..errors import NoSharedMemoryError, PeerError
from ..origin import Origin
from ..protocol.call_layout import AnyInput, CallInput
from .copies import tell_overflow
from .core import Core
from .errors import DeadlineExceededError, PathUnavailableError, stream_held
from .inputs.descriptions import Outputs, wanted_outputs
from .inputs.sources import Source, sources
from .known_model import KnownModel
from .paths.inline import InlineExchange
from .paths.staging import on_devices
from .paths.stream import DirectStream, check_frames, guessed_rooms, ring_end
from .result import Result
from .settings import CallSettings
from .steps import Steps, forget_locals

__all__ = ["OpenStream", "open_stream", "reading", "responses_of"]

_REMEDY: Final = "the memory of a stream does not grow; say it beforehand"


@dataclass(slots=True, eq=False)
class OpenStream:
    """A stream that has its memory."""

    known: KnownModel
    exchange: DirectStream | InlineExchange
    output_devices: Mapping[str, int]
    origin: Origin


def open_stream(
    core: Core, settings: CallSettings, inputs: Mapping[str, Any], outputs: Outputs, frames: int | None
) -> Steps[OpenStream]:
    """Take memory for a request to a decoupled model, and for its responses; copy the inputs there.

    Triton's own shared memory has no room for more than one response.
    """
    wanted, devices = wanted_outputs(outputs)
    known, given = yield from core.fitting(settings, lambda known: sources(known.spec, inputs, core.on_gpus))
    on_host = {name: _on_host(source) for name, source in given.items()}
    path = yield from core.path_of(known, settings)
    frames = check_frames(known.spec, frames)
    exchange: DirectStream | InlineExchange | None = None
    if path == DirectStream.path and known.spec.is_decoupled:
        unguessed = known.lay_out(on_host, wanted, slot_count=1 + frames)
        guesses = guessed_rooms(unguessed, frames, core.stream_guess_bytes)
        layout = known.lay_out(on_host, wanted, slot_count=1 + frames, guesses=guesses)
        end = ring_end(layout, frames)
        try:
            region, memory = yield from core.opening.take(settings, known, end, 1 + frames, f"a stream of {frames}")
        except NoSharedMemoryError as error:
            yield from core.opening.inline_instead(settings, known, error)
        else:
            exchange = DirectStream(core.codec, known.spec, layout, settings.options, region, memory)
            del memory
    elif settings.path not in ("auto", InlineExchange.path):
        raise PathUnavailableError(
            f"a stream of model {known.spec.name!r} cannot take the path {settings.path!r}: "
            "triton-shm has room for one response, and direct needs a decoupled model"
        )
    if exchange is None:
        yield from core.paths.choose(known, InlineExchange.path, settings.deadline)
        exchange = InlineExchange(core.codec, known.spec, known.lay_out(on_host, wanted), settings.options)
    try:
        exchange.write(given)
    except BaseException:
        exchange.close()
        raise
    return OpenStream(known, exchange, devices, settings.origin)


@contextlib.contextmanager
def reading(stream: OpenStream) -> Iterator[None]:
    """Give a stream's memory back in the end; where no response came in time as the user holds all, say so."""
    with contextlib.closing(stream.exchange):
        try:
            yield
        except DeadlineExceededError:
            if not (isinstance(stream.exchange, DirectStream) and stream.exchange.is_held):
                raise
            raise stream_held(stream.known.spec.name) from None


def responses_of(core: Core, stream: OpenStream, answer: Any) -> list[Result]:
    """Return the results of a stream's next answer, one or none, and learn from it.

    The caller alone holds what is in the list.
    """
    try:
        result = stream.exchange.result(answer)
    except BaseException as error:
        if isinstance(error, PeerError):
            core.catalog.drop(stream.known)
        forget_locals(error)
        raise
    if result.overflowed:
        stream.known.learn(result.overflowed, stream.exchange.layout.batch_size or 1)
        tell_overflow(stream.known, result.overflowed, _REMEDY, stream.origin)
    if stream.output_devices:
        result = on_devices(result, stream.output_devices, core.cuda)
    # Triton ends some streams by a response without outputs.
    return [result] if result or stream.exchange.path != InlineExchange.path else []


def _on_host(source: Source) -> AnyInput:
    return CallInput(source.dtype, source.shape, source.byte_size)
