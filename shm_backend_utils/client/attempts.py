"""Sending a call that has its memory: once, or again where that is certain to be right."""

from __future__ import annotations

import logging
import operator
import time
from typing import Final

from ..errors import ClosedError, PeerError, PoolExhaustedError, ShmError, SlotInDoubtError, SlotInUseError
from ..protocol.learned_sizes import CALLS
from ..protocol.refusals import code_in
from .copy_warnings import tell_overflow
from .core import Core, OpenCall
from .errors import InferenceError, MemoryRefusedError, ServerUnavailableError
from .known_model import KnownModel
from .paths.exchange import is_answer
from .paths.staging import brought_to_gpus
from .result import Result
from .settings import LEAST_S, left_until
from .steps import Pause, Steps

__all__ = ["attempt", "finish", "infer_prepared", "repair"]

_LOG: Final = logging.getLogger(__name__)
_MOST_ATTEMPTS: Final = 3
_BYTE_SIZE: Final = operator.attrgetter("byte_size")
_REMEDY: Final = "later calls have room for as much; say it beforehand"
_REMEDY_OF_PREPARED: Final = "the next infer of this call has room for as much on the host; say it beforehand"
_NOT_DONE: Final = ("StatusCode.UNIMPLEMENTED", "501")
"""What the server says over gRPC, and over HTTP, of one answer from a decoupled model."""

_BUSY_PAUSE_S: Final = 0.005  # a refusal takes less than a millisecond


def finish(core: Core, call: OpenCall) -> Steps[Result]:
    """Send a call that was begun, again where that is certain to be right; the call is over then."""
    for number in range(_MOST_ATTEMPTS):
        try:
            # Always a little time, so that what is ready is taken.
            return (yield from attempt(core, call, max(call.settings.deadline - time.monotonic(), LEAST_S)))
        except ShmError as error:
            known = yield from repair(core, call, error, number)
            if known is None or number == _MOST_ATTEMPTS - 1:
                raise
            _LOG.info("a request to model %r is sent again, as it had not started: %s", known.spec.name, error)
            try:
                again = yield from _reopen(core, call, known)
            except PoolExhaustedError:  # the call itself may hold all that there is
                raise error from None
        finally:
            call.exchange.close()
        call = again
    raise AssertionError("the last attempt returns or raises")


def infer_prepared(core: Core, call: OpenCall, timeout_s: float) -> Steps[Result]:
    """Make one request of a call that the user has filled; again, in the same memory, where somebody just held it.

    That is a late request, while it is being refused, or the client's own doubt about it: no model is at work.
    """
    deadline = time.monotonic() + timeout_s
    if call.exchange.lacking:
        yield from core.opening.grow(call.settings._replace(deadline=deadline), call.known, call.exchange)
    refusal: InferenceError | None = None
    try:
        for number in range(1, _MOST_ATTEMPTS + 1):
            try:
                return (yield from attempt(core, call, left_until(deadline), _REMEDY_OF_PREPARED))
            except SlotInDoubtError:
                if refusal is None:
                    raise
                raise refusal from None  # the request was answered: who held its slot then holds it still
            except InferenceError as error:
                is_last = number == _MOST_ATTEMPTS or time.monotonic() + _BUSY_PAUSE_S > deadline
                if is_last or not _was_busy(call, error):
                    raise
                refusal = error
                _LOG.info("a request to model %r is sent again, as its slot was in use", call.known.spec.name)
            yield Pause(_BUSY_PAUSE_S)
            core.tally.retried()
    finally:
        refusal = None  # it has this frame in its traceback
    raise AssertionError("the last attempt returns or raises")


def attempt(core: Core, call: OpenCall, timeout_s: float, remedy: str = _REMEDY) -> Steps[Result]:
    """Make one request of a call, and learn from it; ``remedy`` is what to do where an output found no room."""
    if core.is_closed:
        raise ClosedError("this client")
    try:
        result = yield from call.exchange.send(timeout_s)
    except ServerUnavailableError:
        if core.catalog.forget_with(call.known):
            core.paths.forget_server()  # when it is back, it may have other flags, too
        raise
    except InferenceError as error:
        if call.known.spec.is_decoupled and error.status() in _NOT_DONE:
            raise InferenceError(
                f"model {call.known.spec.name!r} is decoupled, so it answers with any number of responses: ask for "
                f"them by stream(), over gRPC ({error.message()})",
                error.status(),
            ) from None
        raise
    except SlotInDoubtError:
        raise
    except PeerError:  # an answer that the known model would not have given: the next call looks what there is
        core.catalog.drop(call.known)
        raise
    learned, rows = call.known.learned, call.exchange.layout.batch_size or 1
    if result.overflowed:
        learned.learn(result.overflowed, rows)
        tell_overflow(call.known, result.overflowed, remedy, call.settings.origin)
    elif learned.per_row and result.path == "direct":  # on others, no output uses what was learned
        inputs = sum(map(_BYTE_SIZE, call.exchange.layout.table.inputs.values()))
        learned.needed.append((result.bytes_avoided - inputs) / rows)
    if len(learned.needed) >= CALLS and learned.shrink():
        core.drop_idle()
    if call.output_devices:
        library = call.exchange.library or call.settings.library
        result = yield from brought_to_gpus(core.gpus, result, call.output_devices, library, timeout_s)
    core.tally.succeeded(result.path, result.bytes_avoided)
    return result


def repair(core: Core, call: OpenCall, error: ShmError, number: int) -> Steps[KnownModel | None]:
    """Return the model to try again, if the request had certainly not started and something is different now.

    Memory that could not be opened, or not any more, is replaced; if the next one cannot be opened either, another
    path is taken. Memory that a late request was just being refused in is replaced too. ``number`` is that of the
    attempt that failed, from 0.
    """
    if not is_answer(error):
        return None
    exchange, settings = call.exchange, call.settings
    if isinstance(error, MemoryRefusedError):
        if number == 0:
            return call.known
        core.paths.refuse(call.known, exchange.path, str(error), exchange.kind)
        return call.known if settings.path == "auto" else None
    if _was_busy(call, error):
        return call.known
    renewed = yield from core.renew(call.known, settings)
    if renewed is call.known:
        return None
    refused = renewed.refuses(exchange.sources(), call.wanted, exchange.path)
    return renewed if exchange.did_not_start(error) or refused else None


def _reopen(core: Core, call: OpenCall, known: KnownModel) -> Steps[OpenCall]:
    """Return the same call, with the same inputs, but of the model as it is now, and in other memory."""
    given = call.exchange.sources()
    for source in given.values():
        source.is_lent = False  # what is the user's may be what could not be opened
    layout = known.lay_out(given, call.wanted, output_devices=call.output_devices)
    path = yield from core.path_of(known, call.settings, layout)
    exchange = yield from core.opening.open(call.settings, known, path, layout, given, call.wanted)
    try:
        yield from core.fill(exchange, given, call.settings)
    except BaseException:
        exchange.close()
        raise
    core.tally.retried()
    return OpenCall(call.settings, known, exchange, call.wanted, call.output_devices)


def _was_busy(call: OpenCall, error: ShmError) -> bool:
    """Return whether a request was refused because somebody held its slot, and has not started."""
    return code_in(str(error)) == SlotInUseError.code and call.exchange.did_not_start(error)
