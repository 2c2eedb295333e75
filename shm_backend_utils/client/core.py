"""What a client does, without I/O: find the path, take memory, fill it, make the request, repair what can be repaired.

Each operation is a generator of :mod:`.steps`, for both clients.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from ..errors import (
    ClosedError,
    NoSharedMemoryError,
    PeerError,
    ShmError,
    SlotInDoubtError,
    SlotInUseError,
    TensorError,
)
from ..memory import reaper
from ..memory.cuda.memory import CudaAccess
from ..memory.forks import forsake_in_children
from ..origin import Origin
from ..protocol.call_layout import AnyInput, CallInput, lay_out
from ..protocol.refusals import code_in
from .client_memory import ClientMemory
from .copies import tell_overflow, tell_path
from .errors import (
    DeadlineExceededError,
    InferenceError,
    MemoryRefusedError,
    PathUnavailableError,
    ServerUnavailableError,
    stream_held,
)
from .explanation import Explanation
from .inputs.descriptions import InputDescription, Outputs, described_inputs, wanted_outputs
from .inputs.devices import device_source
from .inputs.sources import Source, sources
from .known_model import Catalog, KnownModel
from .paths.choice import PathChooser
from .paths.direct import DirectExchange, PreparedExchange
from .paths.exchange import Exchange, is_answer
from .paths.inline import InlineExchange
from .paths.opening import Opening
from .paths.staging import on_devices
from .paths.stream import DirectStream, check_frames, guessed_rooms, ring_end
from .paths.triton_shm import Registrations
from .result import Result
from .settings import LEAST_S, CallSettings, left_until
from .stats import ClientStats, Tally
from .steps import Pause, Send, Steps, forget_locals, offloaded
from .transports.messages import Codec

__all__ = ["Core", "OpenCall", "OpenStream"]

_LOG: Final = logging.getLogger(__name__)
_LONG_COPY: Final = 4 * 2**20
_CLOSING_S: Final = 5.0
_CLOSING_ROUND_S: Final = 0.02
_MOST_ATTEMPTS: Final = 3
_REMEDY: Final = "later calls have room for as much; say it beforehand"
_REMEDY_OF_PREPARED: Final = "the memory of a prepared call does not grow; prepare it anew, and say so"
_REMEDY_OF_STREAM: Final = "the memory of a stream does not grow; say it beforehand"
_BUSY_PAUSE_S: Final = 0.005  # a refusal takes less than a millisecond

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class OpenCall:
    """A call that has its memory."""

    settings: CallSettings
    known: KnownModel
    exchange: Exchange
    wanted: Mapping[str, int | None] | None
    output_devices: Mapping[str, int]


@dataclass(slots=True, eq=False)
class OpenStream:
    """A stream that has its memory."""

    known: KnownModel
    exchange: DirectStream | InlineExchange
    output_devices: Mapping[str, int]
    origin: Origin


class Core:
    """One client's memory and knowledge.

    Parameters
    ----------
    codec : Codec
        Of the client's transport.
    host : str
        The server's.
    memory : ClientMemory

    Attributes
    ----------
    is_forked : bool
        Whether this is a copy, in a forked child, of its parent's client.
    """

    def __init__(self, codec: Codec, host: str, memory: ClientMemory) -> None:
        options = memory.pool.options
        self.codec = codec
        self.catalog = Catalog(codec, options.head_room)
        self.tally = Tally()
        self._memory = memory
        self.cuda: CudaAccess = memory.bank.cuda
        self.on_gpus = functools.partial(device_source, memory.bank.cuda)
        self._registrations = Registrations(codec)
        self.paths = PathChooser(host, self._registrations, options.access)
        self.opening = Opening(codec, memory, self._registrations)
        self.is_forked = False
        self._is_closed = False
        forsake_in_children(self)
        reaper.reap()

    def forsake(self) -> None:
        """Know that this is a copy, in a forked child, of its parent's client."""
        self.is_forked = True
        self.tally.forsake()

    @property
    def has_registrations(self) -> bool:
        """Whether memory of this client is registered at the server."""
        return not self._registrations.is_empty

    @property
    def is_closed(self) -> bool:
        """Whether the client was closed, or begins to be."""
        return self._is_closed

    @property
    def state(self) -> str:
        """In a word, for people: ``"open"``, ``"closed"``, or ``"forked"``."""
        return "forked" if self.is_forked else "closed" if self._is_closed else "open"

    def rest_at_server(self) -> str | None:
        """Return, for a warning, what a client that nobody closes leaves at the server; None if it was closed."""
        if self._is_closed:
            return None
        kept = ": the server keeps the memory that it has registered there"
        return kept if self.has_registrations else ""

    def check_server_answers(self, timeout_s: float) -> Steps[None]:
        """Raise ServerUnavailableError or DeadlineExceededError unless there is a server."""
        try:
            yield Send(self.codec.ask("model config"), timeout_s)
        except InferenceError as error:
            if not is_answer(error):
                raise  # else it has no model of that name, but it is there

    def begin(self, settings: CallSettings, inputs: Mapping[str, Any], outputs: Outputs) -> Steps[OpenCall]:
        """Take memory for a call and copy its inputs there."""
        wanted, devices = wanted_outputs(outputs)
        known = self.catalog.known.get((settings.model, settings.version))
        if known is None or (known.path != DirectExchange.path and known.is_worth_another_look):
            known = yield from self._look_again(settings)
        while True:
            try:
                given = sources(known.spec, inputs, self.on_gpus)
                layout = lay_out(
                    known.spec,
                    given,
                    wanted,
                    known.data_begin,
                    learned=known.learned,
                    most_rows=known.spec.max_batch_size,
                    output_devices=devices,
                )
                break
            except TensorError:
                renewed = yield from self._look_again(settings)
                if renewed is known:
                    raise
                known = renewed
        is_direct = settings.path == "auto" and known.path == DirectExchange.path
        path = DirectExchange.path if is_direct else (yield from self.path_of(known, settings))
        try:
            exchange = yield from self.opening.open(settings, known, path, layout, given, wanted)
        except NoSharedMemoryError as error:
            path = yield from self._inline_instead(settings, known, error)
            exchange = yield from self.opening.open(settings, known, path, layout, given, wanted)
        try:
            if layout.devices or layout.end < _LONG_COPY:  # in another thread, a GPU has another current stream
                exchange.write(given)
            else:
                yield from offloaded(lambda: exchange.write(given), settings.left_s, "its inputs were being copied")
        except BaseException:
            exchange.close()
            raise
        return OpenCall(settings, known, exchange, wanted, devices)

    def prepare(
        self, settings: CallSettings, inputs: Mapping[str, InputDescription], outputs: Outputs
    ) -> Steps[OpenCall]:
        """Take memory for a call that the user fills."""
        given = described_inputs(inputs)
        wanted, devices = wanted_outputs(outputs)
        known, layout = yield from self.fitting(
            settings, lambda known: known.lay_out(given, wanted, output_devices=devices)
        )
        path = yield from self.path_of(known, settings)
        try:
            exchange = yield from self.opening.open(settings, known, path, layout, given, wanted, PreparedExchange)
        except NoSharedMemoryError as error:
            path = yield from self._inline_instead(settings, known, error)
            exchange = yield from self.opening.open(settings, known, path, layout, given, wanted)
        return OpenCall(settings, known, exchange, wanted, devices)

    def fitting(self, settings: CallSettings, look: Callable[[KnownModel], T]) -> Steps[tuple[KnownModel, T]]:
        """Return a call's model, and what ``look`` makes of it; if its tensors do not fit, of the model as it is now.

        Raises
        ------
        TensorError
            They do not fit that one either.
        """
        known = self.catalog.recall(settings.model, settings.version) or (yield from self._look_again(settings))
        while True:
            try:
                return known, look(known)
            except TensorError:
                renewed = yield from self._look_again(settings)
                if renewed is known:
                    raise
                known = renewed

    def finish(self, call: OpenCall) -> Steps[Result]:
        """Send a call that was begun, again where that is certain to be right; the call is over then."""
        for attempt in range(_MOST_ATTEMPTS):
            try:
                # Always a little time, so that what is ready is taken.
                return (yield from self.send(call, max(call.settings.deadline - time.monotonic(), LEAST_S)))
            except ShmError as error:
                known = yield from self.repair(call, error, attempt)
                if known is None or attempt == _MOST_ATTEMPTS - 1:
                    raise
                _LOG.info("a request to model %r is sent again, as it had not started: %s", known.spec.name, error)
                again = yield from self._reopen(call, known)
            finally:
                call.exchange.close()
            call = again
        raise AssertionError("the last attempt returns or raises")

    def send_prepared(self, call: OpenCall, timeout_s: float) -> Steps[Result]:
        """Make one request of a call that the user has filled; again, in the same memory, where somebody just held it.

        That is a late request, while it is being refused, or the client's own doubt about it: no model is at work.
        """
        deadline = time.monotonic() + timeout_s
        refusal: InferenceError | None = None
        try:
            for attempt in range(1, _MOST_ATTEMPTS + 1):
                try:
                    return (yield from self.send(call, left_until(deadline), _REMEDY_OF_PREPARED))
                except SlotInDoubtError:
                    if refusal is None:
                        raise
                    raise refusal from None  # the request was answered: who held its slot then holds it still
                except InferenceError as error:
                    is_last = attempt == _MOST_ATTEMPTS or time.monotonic() + _BUSY_PAUSE_S > deadline
                    if is_last or not _was_busy(call, error):
                        raise
                    refusal = error
                    _LOG.info("a request to model %r is sent again, as its slot was in use", call.known.spec.name)
                yield Pause(_BUSY_PAUSE_S)
                self.tally.retried()
        finally:
            refusal = None  # it has this frame in its traceback
        raise AssertionError("the last attempt returns or raises")

    def send(self, call: OpenCall, timeout_s: float, remedy: str = _REMEDY) -> Steps[Result]:
        """Make one request of a call, and learn from it; ``remedy`` is what to do where an output found no room."""
        if self._is_closed:
            raise ClosedError("this client")
        try:
            result = yield from call.exchange.send(timeout_s)
        except ServerUnavailableError:
            self.catalog.forget()  # when it is back, it may have other models, and other flags
            self.paths.forget_server()
            raise
        except (InferenceError, SlotInDoubtError):
            raise
        except PeerError:  # an answer that the known model would not have given: the next call looks what there is
            self.catalog.drop(call.known)
            raise
        if result.overflowed:
            call.known.learn(result.overflowed, call.exchange.layout.batch_size or 1)
            tell_overflow(call.known, result.overflowed, remedy, call.settings.origin)
        if call.output_devices:
            result = on_devices(result, call.output_devices, self.cuda)
        self.tally.succeeded(result.path, result.bytes_avoided)
        return result

    def repair(self, call: OpenCall, error: ShmError, attempt: int) -> Steps[KnownModel | None]:
        """Return the model to try again, if the request had certainly not started and something is different now.

        Memory that could not be opened, or not any more, is replaced; if the next one cannot be opened either, another
        path is taken. Memory that a late request was just being refused in is replaced too.
        """
        if not is_answer(error):
            return None
        exchange, settings = call.exchange, call.settings
        if isinstance(error, MemoryRefusedError):
            if attempt == 0:
                return call.known
            self.paths.refuse(call.known, exchange.path, str(error))
            return call.known if settings.path == "auto" else None
        if _was_busy(call, error):
            return call.known
        renewed = yield from self._look_again(settings)
        if renewed is call.known:
            return None
        refused = renewed.refuses(exchange.sources(), call.wanted, exchange.path)
        return renewed if exchange.did_not_start(error) or refused else None

    def open_stream(
        self, settings: CallSettings, inputs: Mapping[str, Any], outputs: Outputs, frames: int | None
    ) -> Steps[OpenStream]:
        """Take memory for a request to a decoupled model, and for its responses; copy the inputs there.

        Triton's own shared memory has no room for more than one response.
        """
        wanted, devices = wanted_outputs(outputs)
        known, given = yield from self.fitting(settings, lambda known: sources(known.spec, inputs, self.on_gpus))
        on_host = {name: _on_host(source) for name, source in given.items()}
        path = yield from self.path_of(known, settings)
        frames = check_frames(known.spec, frames)
        exchange: DirectStream | InlineExchange | None = None
        if path == DirectStream.path and known.spec.is_decoupled:
            unguessed = known.lay_out(on_host, wanted, slot_count=1 + frames)
            guesses = guessed_rooms(unguessed, frames, self._memory.pool.stream_guess_bytes)
            layout = known.lay_out(on_host, wanted, slot_count=1 + frames, guesses=guesses)
            end = ring_end(layout, frames)
            try:
                region, memory = yield from self.opening.take(settings, known, end, 1 + frames, f"a stream of {frames}")
            except NoSharedMemoryError as error:
                yield from self._inline_instead(settings, known, error)
            else:
                exchange = DirectStream(self.codec, known.spec, layout, settings.options, region, memory)
                del memory
        elif settings.path not in ("auto", InlineExchange.path):
            raise PathUnavailableError(
                f"a stream of model {known.spec.name!r} cannot take the path {settings.path!r}: "
                "triton-shm has room for one response, and direct needs a decoupled model"
            )
        if exchange is None:
            yield from self.paths.choose(known, InlineExchange.path, settings.deadline)
            exchange = InlineExchange(self.codec, known.spec, known.lay_out(on_host, wanted), settings.options)
        try:
            exchange.write(given)
        except BaseException:
            exchange.close()
            raise
        return OpenStream(known, exchange, devices, settings.origin)

    @contextlib.contextmanager
    def reading(self, stream: OpenStream) -> Iterator[None]:
        """Give a stream's memory back in the end; where no response came in time as the user holds all, say so."""
        with contextlib.closing(stream.exchange):
            try:
                yield
            except DeadlineExceededError:
                if not (isinstance(stream.exchange, DirectStream) and stream.exchange.is_held):
                    raise
                raise stream_held(stream.known.spec.name) from None

    def responses_of(self, stream: OpenStream, answer: Any) -> list[Result]:
        """Return the results of a stream's next answer, one or none, and learn from it.

        The caller alone holds what is in the list.
        """
        try:
            result = stream.exchange.result(answer)
        except BaseException as error:
            if isinstance(error, PeerError):
                self.catalog.drop(stream.known)
            forget_locals(error)
            raise
        if result.overflowed:
            stream.known.learn(result.overflowed, stream.exchange.layout.batch_size or 1)
            tell_overflow(stream.known, result.overflowed, _REMEDY_OF_STREAM, stream.origin)
        if stream.output_devices:
            result = on_devices(result, stream.output_devices, self.cuda)
        # Triton ends some streams by a response without outputs.
        return [result] if result or stream.exchange.path != InlineExchange.path else []

    def explain(self, model: str, version: str, timeout_s: float) -> Steps[Explanation]:
        """Check everything anew and tell which path a model's calls take, and why."""
        deadline = time.monotonic() + timeout_s
        self.paths.forget_server()
        known = yield from self.catalog.look_up(model, version, timeout_s)
        known.refusals.clear()
        return (yield from self.paths.explain(known, deadline))

    def stats(self) -> ClientStats:
        """Return the figures so far."""
        pool = self._memory.pool
        return self.tally.stats(self.catalog.reasons, pool.wait_count, pool.status)

    def close(self) -> Steps[None]:
        """Remove the memory, and unregister what is registered.

        In this order: a registration that the server has not answered to finds no memory any more. The server may still
        be busy with requests that this client has given up; it is waited for, but not long.
        """
        self._is_closed = True
        self._memory.pool.close()
        deadline = time.monotonic() + _CLOSING_S
        while (yield from self._registrations.drop_all(deadline)) and time.monotonic() < deadline:
            yield Pause(_CLOSING_ROUND_S)

    def path_of(self, known: KnownModel, settings: CallSettings) -> Steps[str]:
        """Return the path of a call; raises as :meth:`.PathChooser.choose`. The user is told where that copies."""
        path = yield from self.paths.choose(known, settings.path, settings.deadline)
        if settings.path == "auto" and path != DirectExchange.path:
            tell_path(known, path, settings.origin)
        return path

    def _look_again(self, settings: CallSettings) -> Steps[KnownModel]:
        return self.catalog.look_up(settings.model, settings.version, settings.left_s)

    def _inline_instead(self, settings: CallSettings, known: KnownModel, error: NoSharedMemoryError) -> Steps[str]:
        """Return the path of a call that needs no shared memory; raise the error if it must not take that."""
        if settings.path != "auto":
            raise error
        try:
            path = yield from self.paths.choose(known, InlineExchange.path, settings.deadline)
        except PathUnavailableError:
            raise error from None
        if not known.is_short_of_memory:
            known.is_short_of_memory = True
            _LOG.warning("a call of model %r takes the path inline: %s", known.spec.name, error)
        return path

    def _reopen(self, call: OpenCall, known: KnownModel) -> Steps[OpenCall]:
        """Return the same call, with the same inputs, but of the model as it is now, and in other memory."""
        given = call.exchange.sources()
        layout = known.lay_out(given, call.wanted, output_devices=call.output_devices)
        path = yield from self.path_of(known, call.settings)
        try:
            exchange = yield from self.opening.open(call.settings, known, path, layout, given, call.wanted)
        except NoSharedMemoryError as error:
            path = yield from self._inline_instead(call.settings, known, error)
            exchange = yield from self.opening.open(call.settings, known, path, layout, given, call.wanted)
        try:
            exchange.write(given)
        except BaseException:
            exchange.close()
            raise
        self.tally.retried()
        return OpenCall(call.settings, known, exchange, call.wanted, call.output_devices)


def _was_busy(call: OpenCall, error: ShmError) -> bool:
    """Return whether a request was refused because somebody held its slot, and has not started."""
    return code_in(str(error)) == SlotInUseError.code and call.exchange.did_not_start(error)


def _on_host(source: Source) -> AnyInput:
    return CallInput(source.dtype, source.shape, source.byte_size)
