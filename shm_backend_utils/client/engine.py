"""What a client does, for both clients: find the path, take memory, fill it, send, repair what can be repaired."""

from __future__ import annotations

import contextlib
import logging
import time
import traceback
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from ..errors import ClosedError, ShmError, TensorError
from ..memory import reaper
from ..tensors.strings import Strings
from . import direct
from .berth import Berth
from .berths import Berths
from .copying import LongCopy, copy_all
from .demand import Demand, Outputs
from .device_sources import DeviceSource, is_on_device, sources_anywhere
from .direct import DirectExchange, PreparedExchange
from .direct_stream import DirectStream, check_frames, ring_size
from .errors import InferenceError, MemoryRefusedError, PathUnavailableError, ServerUnavailableError
from .exchange import Exchange, InlineExchange, is_answer
from .explanation import Explanation
from .memory import ClientMemory
from .models import Catalog, KnownModel
from .options import RequestOptions
from .paths import PathChooser
from .plan import CallPlan, InputDescription, Signature, output_devices, signature, wanted_outputs
from .registration import RegisteredExchange, Registrations
from .result import Result
from .runtime import Runtime
from .sources import Source, StringSource
from .staging import StagedExchange, on_devices
from .stats import ClientStats, Tally
from .transport import Transport

__all__ = ["Engine", "OpenCall"]

T = TypeVar("T")
OpenDirect = Callable[[Demand, KnownModel, CallPlan], Coroutine[Any, Any, DirectExchange]]

_LOG: Final = logging.getLogger(__name__)
_LONG_COPY: Final = 4 * 2**20
_CLOSING_S: Final = 5.0
_CLOSING_ROUND_S: Final = 0.02


@dataclass(eq=False, slots=True)
class OpenCall:
    """A call that has its memory."""

    demand: Demand
    known: KnownModel
    exchange: Exchange


class Engine:
    """One client's connection, memory and knowledge. Everything that may wait is a coroutine; see :mod:`.runtime`."""

    def __init__(self, transport: Transport, runtime: Runtime, memory: ClientMemory) -> None:
        pool, bank = memory.pool, memory.bank
        self.transport = transport
        self.runtime = runtime
        self.catalog = Catalog(transport, pool.options.head_room)
        self.tally = Tally()
        self._pool = pool
        self._bank = bank
        self._is_closed = False
        self.berths = Berths(pool, bank, runtime)
        self._registrations = Registrations(transport)
        self.paths = PathChooser(transport, self._registrations, pool.options.access)
        reaper.reap()

    async def check_server_answers(self, timeout_s: float) -> None:
        """Raise ServerUnavailableError or DeadlineExceededError unless there is a server."""
        try:
            await self.transport.model_config("", "", timeout_s)
        except InferenceError as error:
            if not is_answer(error):
                raise  # else it has no model of that name, but it is there

    async def infer(self, demand: Demand, inputs: Mapping[str, Any], outputs: Outputs) -> Result:
        """Make one request of these inputs, which are copied once."""
        try:
            return await self.finish(await self.begin(demand, inputs, outputs))
        except BaseException:
            self.tally.failed()
            raise

    async def begin(self, demand: Demand, inputs: Mapping[str, Any], outputs: Outputs) -> OpenCall:
        """Take memory for a call and copy its inputs there."""
        known, given, plan = await self.look_at(demand, inputs, outputs, KnownModel.plan)
        exchange = await self._open(demand, known, plan, self._open_kept)
        try:
            if plan.input_byte_size < _LONG_COPY or plan.devices:  # another thread has another current stream
                copy_all(given, exchange.inputs)
            else:
                await LongCopy(given, exchange.inputs, exchange.memory).run(self.runtime)
        except BaseException:
            exchange.close()
            raise
        return OpenCall(demand, known, exchange)

    async def look_at(
        self,
        demand: Demand,
        inputs: Mapping[str, Any],
        outputs: Outputs,
        plan: Callable[[KnownModel, Signature], CallPlan],
    ) -> tuple[KnownModel, dict[str, Source], CallPlan]:
        """Return the model, the inputs and the plan of a call.

        Raises
        ------
        TensorError
            The model does not take it; the server was asked whether its configuration still is what it was.
        """
        known = await self._find(demand)
        try:
            given = sources_anywhere(known.spec, inputs, self._bank.cuda)
            return known, given, plan(known, _signature_of(given, outputs))
        except TensorError:
            renewed = await self._look_again(demand)
            if renewed is known:
                raise
        given = sources_anywhere(renewed.spec, inputs, self._bank.cuda)
        return renewed, given, plan(renewed, _signature_of(given, outputs))

    async def prepare(self, demand: Demand, inputs: Mapping[str, InputDescription], outputs: Outputs) -> OpenCall:
        """Take memory for a call that the user fills."""
        call = signature(inputs, outputs)
        known = await self._find(demand)
        try:
            plan = known.plan(call)
        except TensorError:
            renewed = await self._look_again(demand)
            if renewed is known:
                raise
            known, plan = renewed, renewed.plan(call)
        return OpenCall(demand, known, await self._open(demand, known, plan, self._open_prepared))

    async def finish(self, call: OpenCall) -> Result:
        """Send a call that was begun, again where that is certain to be right; the call is over then."""
        try:
            return await self.send(call, call.demand.left_s)
        except ShmError as error:
            known = await self.repair(call, error, 0)
            if known is None:
                raise
            again = await self._reopen(call, known, error)
        finally:
            call.exchange.close()
        try:
            return await self.send(again, call.demand.left_s)
        except ShmError as error:
            known = await self.repair(again, error, 1)
            if known is None:
                raise
            last = await self._reopen(again, known, error)
        finally:
            again.exchange.close()
        with contextlib.closing(last.exchange):
            return await self.send(last, call.demand.left_s)

    async def send(self, call: OpenCall, timeout_s: float) -> Result:
        """Make one request of a call, and learn from it."""
        if self._is_closed:
            raise ClosedError("this client")
        exchange = call.exchange
        try:
            result = await exchange.infer(timeout_s)
        except ServerUnavailableError:
            self.catalog.forget()  # when it is back, it may have other models, and other flags
            self.paths.forget_server()
            raise
        if result.overflowed:
            call.known.learn(result.overflowed, exchange.plan.batch_size or 1)
        devices = exchange.plan.signature.output_devices
        if devices:
            result = on_devices(result, devices, self._bank.cuda)
        self.tally.succeeded(result.path, result.bytes_avoided)
        return result

    async def repair(self, call: OpenCall, error: ShmError, attempt: int) -> KnownModel | None:
        """Return the model to try again, if the request had certainly not started and something is different now.

        Memory that could not be opened, or not any more, is replaced; if the next one cannot be opened either, another
        path is taken.
        """
        if not is_answer(error):
            return None
        exchange, demand = call.exchange, call.demand
        if isinstance(error, MemoryRefusedError):
            if attempt == 0:
                return call.known
            self.paths.refuse(call.known, exchange.path, str(error))
            return call.known if demand.path == "auto" else None
        renewed = await self._look_again(demand)
        if renewed is call.known:
            return None
        did_not_start = exchange.did_not_start(error) or renewed.refuses(exchange.plan.signature, exchange.path)
        return renewed if did_not_start else None

    async def stream(
        self, demand: Demand, inputs: Mapping[str, Any], outputs: Outputs, frames: int, patience_s: float
    ) -> AsyncGenerator[Result, None]:
        """Make one request and return its responses as they come."""
        with self.tally.failures():
            known, given, plan = await self.look_at(demand, inputs, outputs, KnownModel.plan)
            exchange = await self._open_stream(demand, known, _on_host(known, plan), frames)
            avoided = 0
            with contextlib.closing(exchange):
                copy_all(given, exchange.inputs)
                responses = exchange.responses(patience_s)
                try:
                    async for result in responses:
                        avoided += result.bytes_avoided
                        if result.overflowed:
                            known.learn(result.overflowed, plan.batch_size or 1)
                        given_away = [on_devices(result, plan.signature.output_devices, self._bank.cuda)]
                        del result  # its frame is free as soon as the user lets go of it
                        yield given_away.pop()
                finally:
                    await responses.aclose()
        self.tally.succeeded(exchange.path, avoided)

    async def explain(self, model: str, version: str, timeout_s: float) -> Explanation:
        """Check everything anew and tell which path a model's calls take, and why."""
        self.paths.forget_server()
        known = await self.catalog.look_up(model, version, timeout_s)
        known.refusals.clear()
        return await self.paths.explain(known, timeout_s)

    def stats(self) -> ClientStats:
        """Return the figures so far."""
        return self.tally.stats(self.catalog.reasons, self._pool.wait_count, self._pool.status)

    async def close(self) -> None:
        """Remove the memory, unregister what is registered, and close the connection.

        In this order: a registration that the server has not answered to finds no memory any more. The server may still
        be busy with requests that this client has given up; it is waited for, but not long.
        """
        self._is_closed = True
        self._pool.close()
        deadline = time.monotonic() + _CLOSING_S
        while await self._registrations.drop_all(_CLOSING_S) and time.monotonic() < deadline:
            await self.runtime.pause(_CLOSING_ROUND_S)
        await self.transport.close()
        self.runtime.close()

    async def _find(self, demand: Demand) -> KnownModel:
        return self.catalog.recall(demand.model, demand.version) or await self._look_again(demand)

    async def _look_again(self, demand: Demand) -> KnownModel:
        return await self.catalog.look_up(demand.model, demand.version, demand.left_s)

    async def _open(self, demand: Demand, known: KnownModel, plan: CallPlan, open_direct: OpenDirect) -> Exchange:
        """Choose the path, and take memory."""
        path = known.path if demand.path == "auto" else None
        if path is None:
            path = await self.paths.choose(known, demand.path, demand.left_s)
        if path == DirectExchange.path:
            return await open_direct(demand, known, plan)
        exchange = await self._open_on_host(demand, _on_host(known, plan), path)
        return StagedExchange(self.transport, plan, exchange, self._bank.cuda) if plan.devices else exchange

    async def _open_kept(self, demand: Demand, known: KnownModel, plan: CallPlan) -> DirectExchange:
        return self._opened(direct.keep, demand, await self.berths.brief(demand, known, plan))

    async def _open_prepared(self, demand: Demand, known: KnownModel, plan: CallPlan) -> DirectExchange:
        return self._opened(PreparedExchange, demand, await self.berths.lasting(demand, known, plan))

    def _opened(
        self, exchange: Callable[[Transport, RequestOptions, Berth], DirectExchange], demand: Demand, berth: Berth
    ) -> DirectExchange:
        try:
            return exchange(self.transport, demand.options, berth)
        except BaseException as error:
            del berth
            traceback.clear_frames(error.__traceback__)  # an error that somebody keeps must not keep the slot
            raise

    async def _open_stream(
        self, demand: Demand, known: KnownModel, plan: CallPlan, frames: int
    ) -> DirectStream | InlineExchange:
        """Choose the path of a stream. Triton's own shared memory has no room for more than one response."""
        path = await self.paths.choose(known, demand.path, demand.left_s)
        if path == DirectStream.path and known.spec.is_decoupled:
            check_frames(frames)
            size = ring_size(plan, frames)
            slot, memory = await self.berths.take_slot(demand, size, 1 + frames, f"{path} stream of {frames}")
            return DirectStream(self.transport, plan, demand.options, slot, memory)
        if demand.path not in ("auto", InlineExchange.path):
            raise PathUnavailableError(
                f"a stream of model {known.spec.name!r} cannot take the path {demand.path!r}: "
                "triton-shm has room for one response, and direct needs a decoupled model"
            )
        await self.paths.choose(known, InlineExchange.path, demand.left_s)
        return InlineExchange(self.transport, plan, demand.options)

    async def _open_on_host(self, demand: Demand, plan: CallPlan, path: str) -> Exchange:
        if path == InlineExchange.path:
            return InlineExchange(self.transport, plan, demand.options)
        slot, memory = await self.berths.take_slot(demand, plan.byte_size, 1, path)
        await self._registrations.drop(self._pool.take_unregistered(), demand.left_s)
        return RegisteredExchange(self.transport, plan, demand.options, slot, memory, self._registrations)

    async def _reopen(self, call: OpenCall, known: KnownModel, error: ShmError) -> OpenCall:
        """Return the same call, with the same inputs, but of the model as it is now, and in other memory."""
        _LOG.info("a request to model %r is sent again, as it had not started: %s", known.spec.name, error)
        old = call.exchange
        exchange = await self._open(call.demand, known, known.plan(old.plan.signature), self._open_kept)
        with contextlib.ExitStack() as on_error:
            on_error.callback(exchange.close)
            copy_all({name: self._source_of(old, name) for name in old.inputs}, exchange.inputs)
            on_error.pop_all()
        self.tally.retried()
        return OpenCall(call.demand, known, exchange)

    def _source_of(self, exchange: Exchange, name: str) -> Source:
        array = exchange.inputs[name]
        if is_on_device(array):
            return DeviceSource(array, self._bank.cuda)
        if name not in exchange.plan.strings:
            return Source.of(array)
        encoded = Strings.encoded_as(name, array, exchange.plan.inputs[name].shape)
        return StringSource(name, Source.of(array if array.dtype == object else encoded.numpy()))


def _signature_of(given: Mapping[str, Source], outputs: Outputs) -> Signature:
    described = tuple([(name, source.shape, source.dtype) for name, source in given.items()])
    devices = tuple([(name, source.device) for name, source in given.items() if isinstance(source, DeviceSource)])
    string_sizes = tuple([(name, source.room) for name, source in given.items() if isinstance(source, StringSource)])
    if outputs is None:
        return Signature(described, None, devices, (), string_sizes)
    return Signature(described, wanted_outputs(outputs), devices, output_devices(outputs), string_sizes)


def _on_host(known: KnownModel, plan: CallPlan) -> CallPlan:
    return known.plan(plan.signature.on_host()) if plan.devices else plan
