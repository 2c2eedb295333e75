"""Opening the exchange of a call: with memory for it, on the path that it goes."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final

from ...errors import BudgetError, NoSharedMemoryError
from ...memory.cuda.bank import rounded_up
from ...memory.pool.need import Need
from ...memory.pool.pool import SlotPool
from ...memory.pool.slot import SlotRegion
from ...protocol.call_layout import AnyInput, CallInput, CallLayout, aligned
from ..copy_warnings import tell_gpu_copy, tell_no_growth
from ..errors import PathUnavailableError
from ..inputs.devices import inputs_on_gpus
from ..inputs.gpus import Gpus
from ..known_model import KnownModel
from ..settings import CallSettings
from ..steps import Steps
from ..transports.messages import Codec
from .choice import PathChooser
from .direct import DirectExchange
from .exchange import Exchange, check_sequence_id
from .inline import InlineExchange
from .on_gpus import CallOnGpus, PreparedOnGpus
from .prepared import PreparedExchange
from .providing import provide, wait_for_models
from .side_by_side import SideBySide
from .staging import StagedExchange
from .taking import Memory, Taking
from .triton_shm import RegisteredExchange, Registrations
from .waiting import LostMemoryError

__all__ = ["Opening"]

_LOG: Final = logging.getLogger(__name__)


class Opening:
    """Opens the exchanges of one client."""

    def __init__(
        self,
        codec: Codec,
        pool: SlotPool,
        taking: Taking,
        gpus: Gpus,
        registrations: Registrations,
        paths: PathChooser,
    ) -> None:
        self._codec = codec
        self._pool = pool
        self._taking = taking
        self._side_by_side = SideBySide(taking, pool.options.max_batch_bytes)
        self._gpus = gpus
        self._registrations = registrations
        self._paths = paths

    def open(
        self,
        settings: CallSettings,
        known: KnownModel,
        path: str,
        layout: CallLayout,
        given: Mapping[str, AnyInput],
        wanted: Mapping[str, int | None] | None,
        kind: type[DirectExchange] = DirectExchange,
    ) -> Steps[Exchange]:
        """Take memory for a call, whose layout is for a region with one slot; ``kind`` is for the direct path.

        Shared memory may lack now, ever, or on this machine: PoolExhaustedError, BudgetError, MachineError.
        """
        options = settings.options
        if options:
            check_sequence_id(known.spec, options)
        try:
            if path == DirectExchange.path:
                if layout.devices or layout.lent:
                    return (yield from self._on_gpus(settings, known, layout, given, kind))
                if known.spec.has_batcher and (count := self._side_by_side.most_calls(known, layout)) > 1:
                    row = yield from self._side_by_side.take(
                        settings, known, layout, given, wanted, count, is_kept=kind.is_kept
                    )
                    return kind(self._codec, known.spec, row.layout, options, row.region, row.slot, row.memory)
                need = Need(layout.end - known.data_begin, 1, known.record_byte_size, kind=known.kind)
                region, memory = self._pool.take_idle(need, settings.origin) or (
                    yield from self._taking.wait_for(settings, need)
                )
                if region.data_offset != known.data_begin:  # one of several calls that lie in one region
                    layout = layout.moved(region.data_offset - known.data_begin)
                return kind(self._codec, known.spec, layout, options, region, region.slots[0], memory)
            if path != InlineExchange.path:
                return (yield from self._registered(settings, known, path, layout, given, wanted))
        except (BudgetError, NoSharedMemoryError) as error:
            rooms = layout.table.outputs.items()
            output_devices = {name: layout.devices[room.region - 1] for name, room in rooms if room.region}
            unlearned = known.lay_out(given, wanted, output_devices=output_devices, learned={})
            if unlearned.end < layout.end:
                # What outputs were once finds no room. This call's may overflow as those did.
                return (yield from self.open(settings, known, path, unlearned, given, wanted, kind))
            if isinstance(error, BudgetError):
                raise
            yield from self.inline_instead(settings, known, error)
        exchange = InlineExchange(self._codec, known.spec, _on_host(known, layout, given, wanted), options)
        return self._staged(settings, exchange, given)

    def inline_instead(self, settings: CallSettings, known: KnownModel, error: NoSharedMemoryError) -> Steps[None]:
        """Have a call do without shared memory, which the machine has none of; raise the error if it must not."""
        if settings.path != "auto":
            raise error
        try:
            yield from self._paths.choose(known, InlineExchange.path, settings.deadline)
        except PathUnavailableError:
            raise error from None
        if not known.is_short_of_memory:
            known.is_short_of_memory = True
            _LOG.warning("a call of model %r takes the path inline: %s", known.spec.name, error)

    def grow(self, settings: CallSettings, known: KnownModel, exchange: Exchange) -> Steps[None]:
        """Give a prepared call room for the outputs that found none, if there is memory for that now.

        The settings' deadline is that of its next request.
        """
        assert isinstance(exchange, PreparedExchange)
        rooms = exchange.rooms(known.learned.per_row)
        annex = yield from self._taking.take_more(settings, known, sum(map(aligned, rooms.values())))
        if annex is None:
            tell_no_growth(known, rooms, settings.origin)
        else:
            exchange.extend(annex, rooms)

    def _registered(
        self,
        settings: CallSettings,
        known: KnownModel,
        path: str,
        layout: CallLayout,
        given: Mapping[str, AnyInput],
        wanted: Mapping[str, int | None] | None,
    ) -> Steps[Exchange]:
        layout = _on_host(known, layout, given, wanted)
        region, memory = yield from self._taking.take(settings, known, layout.end, 1, path)
        yield from self._registrations.drop(self._pool.take_unregistered(), settings.deadline)
        registrations, options = self._registrations, settings.options
        exchange = RegisteredExchange(self._codec, known.spec, layout, options, region, memory, registrations)
        return self._staged(settings, exchange, given)

    def _staged(self, settings: CallSettings, exchange: Exchange, given: Mapping[str, AnyInput]) -> Exchange:
        """Return an exchange that takes inputs on GPUs, too, where the call has such."""
        if all(each.device is None for each in given.values()):
            return exchange
        return StagedExchange(exchange, given, self._gpus, settings.library, settings.named)

    def _on_gpus(
        self,
        settings: CallSettings,
        known: KnownModel,
        layout: CallLayout,
        given: Mapping[str, AnyInput],
        kind: type[DirectExchange],
    ) -> Steps[Exchange]:
        region, memory = yield from self._with_devices(settings, known, layout)
        make = PreparedOnGpus if kind.is_kept else CallOnGpus
        gpus = make(self._gpus, region, layout, given, settings.library, settings.named)
        for name, source in inputs_on_gpus(given).items():
            if source.byte_size >= max(self._gpus.lend_bytes, 1) and source.obstacle:
                tell_gpu_copy(known, name, source.obstacle, settings.origin)
        return kind(self._codec, known.spec, layout, settings.options, region, region.slots[0], memory, gpus)

    def _with_devices(
        self, settings: CallSettings, known: KnownModel, layout: CallLayout
    ) -> Steps[tuple[SlotRegion, Memory]]:
        """Take a region, with what the call needs on GPUs."""
        sizes = [rounded_up(byte_size) for byte_size in layout.device_byte_sizes]
        where = [f"cuda:{device}={byte_size}" for device, byte_size in zip(layout.devices, sizes, strict=True)]
        group = " ".join(["direct, on GPUs", *where])
        while True:
            region, memory = yield from self._taking.take(settings, known, layout.end, 1, group)
            try:
                yield from provide(self._pool, self._gpus, settings, region, memory, layout.devices, sizes)
                yield from wait_for_models(settings, region)
            except BaseException as error:
                region.is_spoiled = True
                del memory  # an error that somebody keeps must not keep the slot
                if not isinstance(error, LostMemoryError):
                    raise  # else another region will do
            else:
                return region, memory


def _on_host(
    known: KnownModel, layout: CallLayout, given: Mapping[str, AnyInput], wanted: Mapping[str, int | None] | None
) -> CallLayout:
    """Return a call's layout for paths that have no memory on GPUs."""
    if not (layout.devices or layout.lent):
        return layout
    on_host = {name: CallInput(each.dtype, each.shape, each.byte_size) for name, each in given.items()}
    return known.lay_out(on_host, wanted)
