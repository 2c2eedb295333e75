"""Calls: each takes memory, copies its inputs there, and sends a request; it retries only if that is certainly safe."""

from __future__ import annotations

import functools
import logging
import operator
import time
from collections.abc import Mapping
from typing import Any, Final

from ..errors import (
    ClosedError,
    PeerError,
    PoolExhaustedError,
    ShmError,
    SlotInDoubtError,
    SlotInUseError,
    TensorError,
    code_in,
)
from ..protocol.call_layout import CALLS, CallLayout
from .core import Core, open_call
from .errors import InferenceError, MemoryRefusedError, ServerUnavailableError
from .inputs.devices import device_source
from .inputs.sources import Elsewhere, InputDescription, Outputs, Source, described_inputs, sources, wanted_outputs
from .known_model import KnownModel
from .paths.call import Call, Plan, is_answer, write_inputs
from .paths.direct import DirectCall, PreparedDirectCall
from .paths.on_gpus import brought_to_gpus
from .paths.taking import grow
from .paths.triton_shm import InlineCall
from .result import Result
from .settings import CallSettings
from .steps import Pause, Steps, forget_locals

__all__ = ["finished", "infer", "infer_prepared", "prepare"]

_LOG: Final = logging.getLogger(__name__)
_MOST_ATTEMPTS: Final = 4  # twice in sealed memory, once in /dev/shm, once on another path
_BYTE_SIZE: Final = operator.attrgetter("byte_size")
_BESIDE: Final = "to give it room at once, list it with the other outputs that you want"
_REMEDY: Final = f"later calls have room for as much; {_BESIDE}"
_REMEDY_OF_PREPARED: Final = f"the next infer of this call has room for as much on the host; {_BESIDE}"
_NOT_DONE: Final = ("StatusCode.UNIMPLEMENTED", "501")
"""The status, over gRPC and over HTTP, of a request that asks a decoupled model for a single response."""
_DECOUPLED: Final = "model %r is decoupled: it may send any number of responses; ask for them by stream(), over gRPC"
_INVALID: Final = ("StatusCode.INVALID_ARGUMENT", "400")  # Triton's status for tensors that the model does not take

_BUSY_PAUSE_S: Final = 0.005  # the refusal of a late request takes less than a millisecond


def infer(
    core: Core, settings: CallSettings, inputs: Mapping[str, Any], outputs: Outputs, elsewhere: Elsewhere | None = None
) -> Steps[Result]:
    """Make a call; ``elsewhere`` turns inputs on GPUs into sources, and by default may lend them."""
    wanted, devices = wanted_outputs(outputs)

    def look(known: KnownModel) -> tuple[dict[str, Source], CallLayout]:
        given = sources(known.spec, inputs, elsewhere or core.on_gpus)  # noqa: F821  # deleted after look() has run
        return given, known.lay_out(given, wanted, output_devices=devices)

    known, (given, layout) = yield from core.fitting(settings, look)
    path = yield from core.path_of(known, settings, layout)
    if (
        layout.end <= known.inline_end
        and settings.path == "auto"
        and not (layout.devices or layout.lent)
        and len(layout.certain) == len(known.spec.outputs if wanted is None else wanted)
    ):
        path = InlineCall.path  # all tensors are certainly small enough for this to be faster
    call = yield from open_call(core, path, Plan(settings, known, layout, given, wanted, devices))
    try:
        yield from _fill(call, given)
        del given, look, inputs  # else the user's arrays would live as long as the request
        yield None  # tells the driver that the inputs have been copied
        if core.is_closed:
            raise ClosedError("this client")
    except BaseException:
        call.close()
        raise
    return (yield from finished(core, call, call.send(settings.deadline)))


def finished(core: Core, call: Call, sending: Steps[Result]) -> Steps[Result]:
    """Return the result of a call that ``sending`` sends; retry the call if a retry is certainly safe."""
    failure: ShmError | None = None
    number = 0
    try:
        while True:
            try:
                return (yield from _received(core, call, sending, _REMEDY, call.settings.deadline))
            except ShmError as error:
                failure = error
            forget_locals(failure)  # else the frames in its traceback would keep the slot in use
            known = yield from _repair(core, call, failure, number)
            number += 1
            if known is None or number == _MOST_ATTEMPTS:
                raise failure
            _LOG.info("a request to model %r is sent again, as it had not started: %s", known.spec.name, failure)
            try:
                again = yield from _reopen(core, call, known)
            except PoolExhaustedError:  # the call itself may hold all of the pool's memory
                raise failure from None
            finally:
                call.close()
            call = again
            sending = call.send(call.settings.deadline)
    finally:
        call.close()  # the result's arrays keep their memory
        del failure  # else this frame and the error's traceback would form a cycle


def prepare(
    core: Core, settings: CallSettings, inputs: Mapping[str, InputDescription], outputs: Outputs
) -> Steps[Call]:
    """Take memory for a call that the user fills."""
    given = described_inputs(inputs, functools.partial(device_source, core.gpus, lends=True))
    wanted, devices = wanted_outputs(outputs)
    known, layout = yield from core.fitting(
        settings, lambda known: known.lay_out(given, wanted, output_devices=devices)
    )
    if known.spec.is_decoupled:
        if (yield from core.renew(known, settings)).spec.is_decoupled:
            raise InferenceError(_DECOUPLED % settings.model)
        return (yield from prepare(core, settings, inputs, outputs))  # the reloaded model is not decoupled
    path = yield from core.path_of(known, settings, layout)
    plan = Plan(settings, known, layout, given, wanted, devices)
    return (yield from open_call(core, path, plan, PreparedDirectCall))


def infer_prepared(core: Core, call: Call, deadline: float) -> Steps[Result]:
    """Send one request of a filled call; retry if the model was still refusing a late request that held the slot."""
    if isinstance(call, PreparedDirectCall) and call.lacking:
        yield from _grow(core, call, call.settings._replace(deadline=deadline))
    refusal: InferenceError | None = None
    try:
        for number in range(1, _MOST_ATTEMPTS + 1):
            try:
                if call.gpus is not None:
                    yield from call.gpus.write(call, call.gpus.filled, deadline)
                if core.is_closed:
                    raise ClosedError("this client")
                return (yield from _received(core, call, call.send(deadline), _REMEDY_OF_PREPARED, deadline))
            except InferenceError as error:
                is_last = number == _MOST_ATTEMPTS or time.monotonic() + _BUSY_PAUSE_S > deadline
                if is_last or code_in(str(error)) != SlotInUseError.code:
                    raise
                refusal = error
                forget_locals(error)
            yield Pause(_BUSY_PAUSE_S)
            if not call.did_not_start(refusal):
                raise refusal
            _LOG.info("a request to model %r is sent again, as its slot was in use", call.known.spec.name)
            core.tally.retried()
    finally:
        refusal = None  # else this frame and the error's traceback would form a cycle
    raise AssertionError("the last attempt returns or raises")


def _received(core: Core, call: Call, sending: Steps[Result], remedy: str, deadline: float) -> Steps[Result]:
    try:
        result = yield from sending
    except ShmError as error:
        meaning = _meaning(core, call, error)
        if meaning is not error:
            raise meaning from None
        raise
    result = yield from _learned(core, call, result, remedy, deadline)
    core.tally.succeeded(result.path, result.bytes_avoided)
    return result


def _repair(core: Core, call: Call, error: ShmError, number: int) -> Steps[KnownModel | None]:
    """Return the model for a retry; None if the request may have started, or a retry would fail in the same way."""
    if not is_answer(error):
        return None
    if isinstance(error, MemoryRefusedError):
        if number:
            core.paths.refuse(call.known, call.path, str(error), call.kind)
        return call.known if not number or call.settings.path == "auto" else None
    if code_in(str(error)) == SlotInUseError.code:
        return call.known if call.did_not_start(error) else None
    try:
        renewed = yield from core.renew(call.known, call.settings)
    except ShmError:
        return None  # the call's own error tells the user more
    if renewed is call.known:
        return None
    is_refused = error.status() in _INVALID and not _fits(renewed, call)  # the retry only raises a TensorError
    return renewed if call.did_not_start(error) or is_refused else None


def _fits(known: KnownModel, call: Call) -> bool:
    try:
        known.lay_out(call.sources(), call.wanted)
    except TensorError:
        return False
    return True


def _reopen(core: Core, call: Call, known: KnownModel) -> Steps[Call]:
    """Return a new call with the same inputs in other memory, for the model's present configuration."""
    given = call.sources()
    for source in given.values():
        source.is_lent = False  # the model may have failed to open the user's own memory
    layout = known.lay_out(given, call.wanted, output_devices=call.output_devices)
    path = yield from core.path_of(known, call.settings, layout)
    plan = Plan(call.settings, known, layout, given, call.wanted, call.output_devices)
    again = yield from open_call(core, path, plan)
    try:
        yield from _fill(again, given)
    except BaseException:
        again.close()
        raise
    core.tally.retried()
    return again


def _fill(call: Call, given: Mapping[str, Source]) -> Steps[None]:
    on_host = {name: source for name, source in given.items() if source.device is None}
    yield from write_inputs(call, on_host, call.settings)
    if call.gpus is not None:
        yield from call.gpus.write(call, given, call.settings.deadline)


def _meaning(core: Core, call: Call, error: ShmError) -> ShmError:
    """Return the error to raise for a failed request; forget a server or model that the error shows to have changed."""
    if isinstance(error, ServerUnavailableError):
        core.forget_with(call.known)
    elif isinstance(error, InferenceError):
        if call.known.spec.is_decoupled and error.status() in _NOT_DONE:
            return InferenceError(_DECOUPLED % call.known.spec.name, error.status())
    elif isinstance(error, PeerError) and not isinstance(error, SlotInDoubtError):
        core.drop(call.known)  # the model has changed: the next call asks for its configuration
    return error


def _learned(core: Core, call: Call, result: Result, remedy: str, deadline: float) -> Steps[Result]:
    """Learn the sizes of a result's outputs, and copy outputs to the GPUs that the user named."""
    learned, layout = call.known.learned, call.layout
    rows = layout.batch_size or 1
    if result.overflowed:
        learned.learn(result.overflowed, rows)
        call.known.warn_of_overflow(result.overflowed, remedy, call.settings.origin)
    elif (  # else no output uses the learned sizes
        learned.per_row and result.path == DirectCall.path and len(layout.certain) < len(layout.table.outputs)
    ):
        inputs = sum(map(_BYTE_SIZE, layout.table.inputs.values()))
        learned.needed.append((result.bytes_avoided - inputs) / rows)
    if len(learned.needed) >= CALLS and learned.shrink():
        core.pool.drop_idle()
    if call.output_devices:
        library = call.settings.library if call.gpus is None else call.gpus.library
        result = yield from brought_to_gpus(core.gpus, result, call.output_devices, library, deadline)
    return result


def _grow(core: Core, call: PreparedDirectCall, settings: CallSettings) -> Steps[None]:
    """Give a prepared call room for its lacking outputs, or warn the user if the pool has no memory for them now."""
    layout = call.with_room(call.known.learned.per_row)
    if len(call.region.slots) == 1 and (yield from grow(core.pool, settings, call.region, call.memory, layout.end)):
        call.grow(layout)
    elif not call.is_closed:
        rooms = {name: layout.table.outputs[name].byte_size for name in call.lacking}
        byte_size = sum(rooms.values())
        message = (
            f"a prepared call of model {call.known.spec.name!r} has too little room for {', '.join(map(repr, rooms))}, "
            f"and the pool has no {byte_size} bytes now. Until it has, Triton carries and copies these outputs; "
            f"release results sooner, raise PoolOptions(max_bytes=...), or give the call room when you prepare it, "
            f"listed with the other outputs that you want: outputs={rooms}"
        )
        call.known.warn("no memory to grow", message, settings.origin, byte_size)
