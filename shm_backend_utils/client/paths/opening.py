"""Taking memory for a call, on the path that it goes."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from ...dtypes import BYTES
from ...errors import BudgetError, MachineError, NoSharedMemoryError
from ...memory.cuda.bank import rounded_up
from ...memory.kinds import RegionKind
from ...memory.pool.need import Need
from ...memory.pool.rows import Row, RowBlocks
from ...memory.pool.slot import SlotRegion
from ...memory.pool.tickets import Ticket
from ...protocol.call_layout import AnyInput, CallInput, CallLayout, aligned, rows_of
from ...protocol.layout import data_offset
from ..client_memory import ClientMemory
from ..copies import tell_gpu_copy, tell_no_growth
from ..errors import DeadlineExceededError, PathUnavailableError
from ..inputs.devices import inputs_on_gpus
from ..inputs.gpus import Gpus
from ..known_model import KnownModel
from ..settings import CallSettings
from ..steps import Steps, Wait, offloaded
from ..transports.messages import Codec
from .choice import PathChooser
from .direct import DirectExchange
from .exchange import Exchange
from .further import HostMemory
from .inline import InlineExchange
from .on_gpus import CallOnGpus, PreparedOnGpus
from .prepared import PreparedExchange
from .providing import provide, wait_for_models
from .staging import StagedExchange
from .triton_shm import RegisteredExchange, Registrations
from .waiting import LostMemoryError

__all__ = ["Opening"]

Memory = npt.NDArray[np.uint8]

_LOG: Final = logging.getLogger(__name__)
_MOST_ROWS: Final = 64


class Opening:
    """Opens the exchanges of one client.

    Parameters
    ----------
    codec : Codec
    memory : ClientMemory
    gpus : Gpus
    registrations : Registrations
    paths : PathChooser
    """

    def __init__(
        self, codec: Codec, memory: ClientMemory, gpus: Gpus, registrations: Registrations, paths: PathChooser
    ) -> None:
        self._codec = codec
        self._pool = memory.pool
        self._gpus = gpus
        self._registrations = registrations
        self._paths = paths
        self._blocks: RowBlocks[CallLayout] = RowBlocks()

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
        """Take memory for a call.

        Parameters
        ----------
        settings : CallSettings
            The call's.
        known : KnownModel
            Its model.
        path : str
            As chosen.
        layout : CallLayout
            In a region with one slot.
        given, wanted
            What the layout was made of.
        kind : type
            Of the exchange on the direct path.

        Raises
        ------
        PoolExhaustedError, BudgetError, MachineError
            There is not enough shared memory: now, ever, or on this machine.
        """
        options = settings.options
        try:
            if path == DirectExchange.path:
                if layout.devices or layout.lent:
                    return (yield from self._on_gpus(settings, known, layout, given, kind))
                if known.spec.has_batcher and (count := self._row_count(known, layout)) > 1:
                    row = yield from self._beside_others(settings, known, layout, given, wanted, count, kind)
                    return kind(self._codec, known.spec, row.layout, options, row.region, row.slot, row.memory)
                need = Need(layout.end - known.data_begin, 1, known.record_byte_size, kind=known.kind)
                region, memory = self._pool.take_idle(need, settings.origin) or (
                    yield from self._wait(settings, self._pool.request(need, settings.origin))
                )
                return kind(self._codec, known.spec, layout, options, region, region.slots[0], memory)
            if path != InlineExchange.path:
                return (yield from self._registered(settings, known, path, layout, given, wanted))
        except BudgetError:
            unlearned = known.lay_out(given, wanted, learned={})
            if layout.devices or layout.lent or unlearned.end == layout.end:
                raise  # else it is what outputs were once that finds no room, and this call's may overflow as those did
            return (yield from self.open(settings, known, path, unlearned, given, wanted, kind))
        except NoSharedMemoryError as error:
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

    def take(
        self, settings: CallSettings, known: KnownModel, end: int, slot_count: int, group: str
    ) -> Steps[tuple[SlotRegion, Memory]]:
        """Take a region for a model's calls, until the deadline.

        Parameters
        ----------
        settings : CallSettings
            The call's.
        known : KnownModel
            Its model.
        end : int
            Where the last tensor ends in the region.
        slot_count : int
            Of the region.
        group : str
            Regions of different groups are never exchanged.

        Returns
        -------
        SlotRegion, numpy.ndarray of uint8
            When the array, which is the whole region, and all arrays made from it are gone, the region is given back.
        """
        size = known.record_byte_size
        kind = RegionKind.SYSTEM if group == RegisteredExchange.path else known.kind
        need = Need(end - data_offset(slot_count, size), slot_count, size, group, kind)
        return self._pool.take_idle(need, settings.origin) or (
            yield from self._wait(settings, self._pool.request(need, settings.origin))
        )

    def grow(self, settings: CallSettings, known: KnownModel, exchange: Exchange) -> Steps[None]:
        """Give a prepared call room for the outputs that found none, if there is memory for that now.

        Parameters
        ----------
        settings : CallSettings
            The call's, with the deadline of its next request.
        known : KnownModel
            Its model.
        exchange : Exchange
            The call's own.
        """
        assert isinstance(exchange, PreparedExchange)
        rooms = exchange.rooms(known.learned)
        annex = yield from self.take_more(settings, known, sum(map(aligned, rooms.values())))
        if annex is None:
            tell_no_growth(known, rooms, settings.origin)
        else:
            exchange.extend(annex, rooms)

    def take_more(self, settings: CallSettings, known: KnownModel, byte_size: int) -> Steps[HostMemory | None]:
        """Take a region beside a call's own, with so many bytes of data, if there is room for it now; else None."""
        need = Need(byte_size, 1, known.record_byte_size, kind=known.kind)
        try:
            taken = yield from self._at_once(settings, need)
        except DeadlineExceededError:
            return None
        return None if taken is None else HostMemory(*taken)

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
        region, memory = yield from self.take(settings, known, layout.end, 1, path)
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
            if not source.is_lent and source.byte_size >= max(self._gpus.lend_bytes, 1) and source.obstacle:
                tell_gpu_copy(known, name, source.obstacle, settings.origin)
        return kind(self._codec, known.spec, layout, settings.options, region, region.slots[0], memory, gpus)

    def _row_count(self, known: KnownModel, layout: CallLayout) -> int:
        """Return how many calls like this may lie side by side; less than 2 for calls of which no batches are made."""
        if layout.batch_size is None or any(span.dtype is BYTES for span in layout.table.inputs.values()):
            return 0
        size = layout.end - known.data_begin
        most = min(_MOST_ROWS, self._pool.options.max_batch_bytes // max(size, 1))
        return min(known.spec.max_batch_size // layout.batch_size, most)

    def _beside_others(
        self,
        settings: CallSettings,
        known: KnownModel,
        layout: CallLayout,
        given: Mapping[str, AnyInput],
        wanted: Mapping[str, int | None] | None,
        count: int,
        kind: type[DirectExchange],
    ) -> Steps[Row[CallLayout]]:
        table = layout.table
        spans = tuple(table.inputs.items()), tuple(table.outputs.items())
        key = (settings.model, settings.version, layout.requested, *spans)
        if kind.is_kept:
            self._blocks.expect(key)
        row = self._blocks.take(key)
        if row is not None:
            return row
        if self._blocks.is_wanted(key):
            whole = known.lay_out(
                {name: _times(each, count) for name, each in given.items()},
                None
                if wanted is None
                else {name: None if size is None else size * count for name, size in wanted.items()},
                slot_count=count,
                is_one_request=False,
            )
            size = known.record_byte_size
            need = Need(whole.end - data_offset(count, size), count, size, "direct, side by side", known.kind)
            taken = yield from self._at_once(settings, need)
            if taken is not None:
                rows = layout.batch_size or 1
                parts = [rows_of(whole, known.spec, index * rows, (index + 1) * rows) for index in range(count)]
                return self._blocks.begin(key, *taken, parts)
        region, memory = yield from self.take(settings, known, layout.end, 1, DirectExchange.path)
        self._blocks.note_alone(key, memory)
        return Row(region, region.slots[0], layout, memory)

    def _at_once(self, settings: CallSettings, need: Need) -> Steps[tuple[SlotRegion, Memory] | None]:
        """Take a region if there is room for it now."""
        taken = self._pool.take_idle(need, settings.origin)
        if taken is not None:
            return taken
        try:
            ticket = self._pool.request_at_once(need, settings.origin)
            return None if ticket is None else (yield from self._wait(settings, ticket))
        except (BudgetError, MachineError):
            return None

    def _wait(self, settings: CallSettings, ticket: Ticket) -> Steps[tuple[SlotRegion, Memory]]:
        try:
            if not ticket.granted.done():
                timeout_s = settings.left_s
                try:
                    yield Wait(ticket.granted, timeout_s)
                except TimeoutError:
                    raise self._pool.exhausted(ticket, timeout_s) from None
            redeem = functools.partial(self._pool.redeem, ticket, settings.deadline)
            return (yield from offloaded(redeem, settings.left_s, "its memory was being made"))
        except BaseException:
            self._pool.withdraw(ticket)
            raise

    def _with_devices(
        self, settings: CallSettings, known: KnownModel, layout: CallLayout
    ) -> Steps[tuple[SlotRegion, Memory]]:
        """Take a region, with what the call needs on GPUs."""
        sizes = [rounded_up(byte_size) for byte_size in layout.device_byte_sizes]
        where = [f"cuda:{device}={byte_size}" for device, byte_size in zip(layout.devices, sizes, strict=True)]
        group = " ".join([DirectExchange.path, *where])
        while True:
            region, memory = yield from self.take(settings, known, layout.end, 1, group)
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


def _times(each: AnyInput, count: int) -> CallInput:
    return CallInput(each.dtype, (each.shape[0] * count, *each.shape[1:]), each.byte_size * count, each.device)
