"""The core of a client: models and their paths, the memory that its calls take, GPUs and registrations."""

from __future__ import annotations

import functools
import logging
import math
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Final, TypeVar

from ..errors import BudgetError, CallerError, NoSharedMemoryError, TensorError
from ..gpu.memory.access import CudaAccess
from ..gpu.memory.bank import DeviceBank
from ..memory import reaper
from ..memory.pool.inventory import DIRECT, PREPARED
from ..memory.pool.options import PoolOptions
from ..memory.pool.pool import SlotPool
from ..model_spec import ModelSpec
from ..process import call_after_fork
from ..protocol.call_layout import AnyInput, CallLayout
from .errors import InferenceError, PathUnavailableError
from .explanation import ClientStats, Explanation, Tally
from .inputs.devices import Gpus, device_source, inputs_on_gpus
from .known_model import KnownModel
from .once import Once
from .paths.call import Call, Plan, check_sequence_id, is_answer
from .paths.choice import PathChooser
from .paths.direct import DirectCall, PreparedDirectCall
from .paths.on_gpus import CallOnGpus, StagedOnGpus
from .paths.taking import take, take_row, take_with_devices
from .paths.triton_shm import InlineCall, RegisteredCall, Registrations
from .settings import CallSettings
from .steps import Pause, Send, Steps
from .transports.messages import Codec
from .transports.transport import AsyncTransport, Transport

__all__ = ["ClientMemory", "Core", "inline_instead", "open_call"]


class ClientMemory:
    """A client's slots, until the client is garbage or Python exits; CallerError if ``options`` has another type."""

    def __init__(self, owner: object, options: PoolOptions, cuda: CudaAccess) -> None:
        if not isinstance(options, PoolOptions):
            raise CallerError(f"pool is {options!r}; expected PoolOptions(max_bytes=...)")
        self.bank = DeviceBank(cuda, options.max_device_bytes, options.access)  # the regions' memory on GPUs
        self.pool = SlotPool(options, self.bank.collect)
        self.abandon = weakref.finalize(owner, _abandon, self.pool, self.bank)  # finalizers may call it, too

    def end(self) -> None:
        self.pool.close()
        self.bank.close()
        self.abandon.detach()


def _abandon(pool: SlotPool, bank: DeviceBank) -> None:
    pool.abandon()
    bank.abandon()


_CLOSING_S: Final = 5.0
_CLOSING_ROUND_S: Final = 0.02

T = TypeVar("T")


class Core:
    """One client's memory, and its knowledge of the server and its models."""

    codec: Codec  # connect() sets it and the next two
    registrations: Registrations
    paths: PathChooser

    def __init__(self, memory: ClientMemory) -> None:
        options = memory.pool.options
        self.known: dict[tuple[str, str], KnownModel] = {}  # the models called so far, by name and version
        self.tally = Tally()
        self.pool = memory.pool
        self.gpus = Gpus(memory.bank, options.lend_bytes)
        self.on_gpus = functools.partial(device_source, self.gpus)
        self.copied_from_gpus = functools.partial(device_source, self.gpus, lends=False)
        self.once = Once()
        self.is_forked = False  # True in the copy that a forked child has
        self.is_closed = False  # True from the beginning of close()
        call_after_fork(self)

    def connect(self, transport: Transport | AsyncTransport, inline_bytes: int | None) -> None:
        """Take the connection before its first request; ``inline_bytes`` None means the codec's default."""
        codec = self.codec = transport.codec
        self.registrations = Registrations(codec)
        inline_bytes = codec.inline_bytes if inline_bytes is None else inline_bytes
        self.paths = PathChooser(codec, transport.host, self.registrations, self.pool.options, inline_bytes)
        reaper.reap()

    def after_fork(self) -> None:
        self.is_forked = True
        self.tally.after_fork()

    @property
    def state(self) -> str:
        """For people: ``"open"``, ``"not connected yet"``, ``"closed"``, or ``"forked"``."""
        if self.is_forked or self.is_closed:
            return "forked" if self.is_forked else "closed"
        return "open" if hasattr(self, "codec") else "not connected yet"

    def rest_at_server(self) -> str | None:
        """Return a warning's words on memory that an unclosed client leaves at the server; None if it was closed."""
        if self.is_closed:
            return None
        kept = ": the server keeps the memory that it has registered there"
        return "" if self.registrations.is_empty else kept

    def check_server_answers(self, deadline: float) -> Steps[None]:
        """Raise ServerUnavailableError or DeadlineExceededError unless there is a server."""
        try:
            yield Send(self.codec.ask("model config"), deadline)
        except InferenceError as error:
            if not is_answer(error):
                raise  # else the server answers that it has no such model

    def fitting(self, settings: CallSettings, look: Callable[[KnownModel], T]) -> Steps[tuple[KnownModel, T]]:
        """Return a call's model and ``look(model)``; if the tensors do not fit, ask for the model again and retry."""
        known = self._recall(settings.model, settings.version) or (yield from self.known_model(settings))
        while True:
            try:
                return known, look(known)
            except TensorError:
                renewed = yield from self.renew(known, settings)
                if renewed is known:
                    raise
                known = renewed

    def explain(self, model: str, version: str, deadline: float) -> Steps[Explanation]:
        """Repeat all checks, and return which path a model's calls take, and why."""
        self.paths.forget_server()
        known = yield from self.look_up(model, version, deadline)
        known.refusals.clear()
        known.sealed = None
        return (yield from self.paths.explain(known, deadline))

    def stats(self) -> ClientStats:
        found = [(known.spec.name, known.explanation) for known in list(self.known.values())]
        reasons = {name: f"{why.path}: {why.reason}" for name, why in found if why is not None}
        return self.tally.stats(reasons, self.pool.wait_count, self.pool.status)

    def close(self) -> Steps[None]:
        """Remove the memory, so that late registrations find none, and then unregister all regions."""
        self.is_closed = True
        self.pool.close()
        self.gpus.close()
        deadline = time.monotonic() + _CLOSING_S
        while (yield from self.registrations.drop(None, deadline)) and time.monotonic() < deadline:
            yield Pause(_CLOSING_ROUND_S)

    def path_of(self, known: KnownModel, settings: CallSettings, layout: CallLayout) -> Steps[str]:
        """Return the path of a call; raises as :meth:`.PathChooser.choose`. It warns the user if that path copies."""
        if known.explanation is None:
            yield from self.known_model(settings)  # so that of many calls only one makes the checks
        path = yield from self.paths.choose(known, settings.path, settings.deadline)
        if settings.path == "auto" and path != DirectCall.path:
            size = math.inf if layout.lent else layout.end - known.data_begin + sum(layout.device_byte_sizes)
            known.warn_of_path(path, known.reason, size, settings.origin)
        return path

    def known_model(self, settings: CallSettings, since: float = -math.inf) -> Steps[KnownModel]:
        """Return a call's model with its paths, as found at ``since`` or later; of many calls, only one asks."""
        key = settings.model, settings.version

        def ask() -> Steps[KnownModel]:
            known = self._recall(*key)
            if known is None or known.seen < since:
                known = yield from self.look_up(*key, settings.deadline)
            if known.explanation is None:
                yield from self.paths.explain(known, settings.deadline)
            return known

        while True:
            known = yield from self.once.find(key, ask, settings.deadline)
            if known.seen >= since:  # else another call asked the server before ``since``
                return known

    def renew(self, outdated: KnownModel, settings: CallSettings) -> Steps[KnownModel]:
        """Return a model as the server describes it after a failed call; ``outdated`` itself if nothing has changed."""
        known = self.known.get((settings.model, settings.version), outdated)
        return known if known is not outdated else (yield from self.known_model(settings, time.monotonic()))

    def _recall(self, model: str, version: str) -> KnownModel | None:
        """Return a known model; None if no call has asked the server for it, or it is time to ask again."""
        known = self.known.get((model, version))
        return None if known is None or known.is_worth_another_look else known

    def look_up(self, model: str, version: str, deadline: float) -> Steps[KnownModel]:
        """Ask the server for a model, and return it; the same object as before if nothing has changed."""
        asked = time.monotonic()
        answer = yield Send(self.codec.ask("model config", model, version), deadline)
        spec = ModelSpec.of_server(model, self.codec.as_dict(answer))
        known = self.known.get((model, version))
        if known is None or known.spec != spec:
            if known is not None:
                _LOG.info("model %r has another configuration now", model)
            known = self.known[model, version] = KnownModel(spec, self.pool.options.head_room, version)
        known.seen = asked
        return known

    def drop(self, known: KnownModel) -> None:
        """Forget a model that has changed at the server."""
        for key, each in list(self.known.items()):
            if each is known:
                self.known.pop(key, None)

    def forget_with(self, known: KnownModel) -> None:
        """Forget the server and all models if ``known`` is current: the server may have restarted with other models."""
        if known in self.known.values():
            self.known.clear()
            self.paths.forget_server()


_LOG: Final = logging.getLogger(__name__)
_MOST_IN_A_MESSAGE: Final = 2**31 - 2**20
"""The most bytes of inputs: protobuf's sizes have 31 bits, and names, shapes and the like need some room."""


def open_call(core: Core, path: str, plan: Plan, kind: type[DirectCall] = DirectCall) -> Steps[Call]:
    """Take memory for a call; ``kind`` is its class on the direct path."""
    settings, known, layout, given, wanted, output_devices = plan
    if settings.options:
        check_sequence_id(known.spec, settings.options)
    try:
        if path == DirectCall.path:
            return (yield from _direct(core, plan, kind))
        layout = plan.on_host
        if path != InlineCall.path:
            region, memory = yield from take(core.pool, settings, known, layout.end, 1, path)
            yield from core.registrations.drop(core.pool.take_unregistered(), settings.deadline)
            of_all = core.codec, settings, known, layout, wanted, output_devices
            return _staged(core, RegisteredCall(*of_all, region, memory, core.registrations), given)
    except (BudgetError, NoSharedMemoryError) as error:
        rooms = layout.table.outputs.items()
        devices = {name: layout.devices[room.region - 1] for name, room in rooms if room.region}
        unlearned = known.lay_out(given, wanted, output_devices=devices, learned={})
        if unlearned.end < layout.end:
            # Room for outputs as large as earlier ones does not fit. With less room, outputs may overflow again.
            return (yield from open_call(core, path, plan._replace(layout=unlearned), kind))
        if isinstance(error, BudgetError):
            raise
        yield from inline_instead(core, settings, known, error)
        layout = plan.on_host
    byte_size = sum(span.byte_size for span in layout.table.inputs.values())
    if byte_size > _MOST_IN_A_MESSAGE:
        raise TensorError(
            next(iter(layout.table.inputs)),
            f"the inputs of model {known.spec.name!r} take {byte_size:,} bytes, but a message carries less than 2 GiB; "
            "make several calls, or use the path direct or triton-shm (client.explain(model) says why it is closed)",
        )
    return _staged(core, InlineCall(core.codec, settings, known, layout, wanted, output_devices), given)


def inline_instead(core: Core, settings: CallSettings, known: KnownModel, error: NoSharedMemoryError) -> Steps[None]:
    """Let a call without shared memory go inline; raise ``error`` if the user or the model excludes that path."""
    if settings.path != "auto":
        raise error
    try:
        yield from core.paths.choose(known, InlineCall.path, settings.deadline)
    except PathUnavailableError:
        raise error from None
    if "no shared memory" not in known.warned:
        known.warned.add("no shared memory")
        _LOG.warning("a call of model %r takes the path inline: %s", known.spec.name, error)


def _direct(core: Core, plan: Plan, kind: type[DirectCall]) -> Steps[DirectCall]:
    """Take memory for a direct call: a region with GPU memory, a row that similar calls share, or a host region."""
    settings, known, layout, given, wanted, output_devices = plan
    is_prepared, row = kind is PreparedDirectCall, None
    if layout.devices or layout.lent:
        region, memory = yield from take_with_devices(core.pool, core.gpus, plan)
        gpus = CallOnGpus(core.gpus, region, plan, is_prepared=is_prepared)
        for name, source in inputs_on_gpus(given).items():
            if source.byte_size >= max(core.gpus.lend_bytes, 1) and source.obstacle:
                message = f"input {name!r} of model {known.spec.name!r} is copied on its GPU: {source.obstacle}"
                known.warn(f"input {name}: {source.obstacle}", message, settings.origin)
        of_region = layout._replace(table=gpus.table), wanted, output_devices, region, region.slots[0], memory
        call = kind(core.codec, settings, known, *of_region, gpus.buffers)
        call.gpus = gpus
        return call
    if known.spec.has_batcher and (not is_prepared or len(layout.certain) == len(layout.table.outputs)):
        last = known.last
        beside, of_it = (None, None) if last is None else (last[0](), last[1])
        is_expected = is_prepared or (beside is not None and (of_it or beside.layout) == layout)
        row = yield from take_row(core.pool, core.once, plan, is_expected=is_expected)
    if row is not None:
        layout, region, slot, memory = row.layout, row.region, row.slot, row.memory
    else:
        group = PREPARED if is_prepared else DIRECT
        region, memory = yield from take(core.pool, settings, known, layout.end, 1, group)
        slot = region.slots[0]
        if region.data_offset != known.data_begin:  # several calls share the region
            layout = layout.moved(region.data_offset - known.data_begin)
    call = kind(core.codec, settings, known, layout, wanted, output_devices, region, slot, memory)
    known.last = weakref.ref(call), plan.layout
    return call


def _staged(core: Core, call: Call, given: Mapping[str, AnyInput]) -> Call:
    if any(each.device is not None for each in given.values()):
        call.gpus = StagedOnGpus(core.gpus, given, call.settings)
    return call
