"""Opening calls: each takes memory on its path."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping
from typing import Final

from ..errors import BudgetError, NoSharedMemoryError, TensorError
from ..memory.pool.need import Need
from ..protocol.call_layout import AnyInput
from .core import Core
from .errors import PathUnavailableError
from .inputs.devices import inputs_on_gpus
from .known_model import KnownModel, tell_gpu_copy
from .paths.call import Call, Plan, check_sequence_id
from .paths.direct import DirectCall, PreparedDirectCall
from .paths.on_gpus import CallOnGpus, StagedOnGpus
from .paths.taking import take, take_row, take_with_devices, wait_for
from .paths.triton_shm import InlineCall, RegisteredCall
from .settings import CallSettings
from .steps import Steps

__all__ = ["inline_instead", "open_call"]

_LOG: Final = logging.getLogger(__name__)
_MOST_IN_A_MESSAGE: Final = 2**31 - 2**20
"""Of inputs: protobuf counts in 31 bits, and their names, shapes and the like need some room."""


def open_call(core: Core, path: str, plan: Plan, kind: type[DirectCall] = DirectCall) -> Steps[Call]:
    """Take memory for a call; ``kind`` is its class on the direct path.

    PoolExhaustedError: there is no shared memory now; BudgetError: never as much; MachineError: none on this machine.
    """
    settings, known, layout, given, wanted, output_devices = plan
    if settings.options:
        check_sequence_id(known.spec, settings.options)
    try:
        if path == DirectCall.path:
            if layout.devices or layout.lent:
                return (yield from _on_gpus(core, plan, kind))
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
            # There is no room for outputs as large as those of earlier calls. This call's may overflow, as those did.
            return (yield from open_call(core, path, plan._replace(layout=unlearned), kind))
        if isinstance(error, BudgetError):
            raise
        yield from inline_instead(core, settings, known, error)
        layout = plan.on_host
    byte_size = sum(span.byte_size for span in layout.table.inputs.values())
    if byte_size > _MOST_IN_A_MESSAGE:
        raise TensorError(
            next(iter(layout.table.inputs)),
            f"the inputs of model {known.spec.name!r} take {byte_size:,} bytes, and a message carries less than 2 GiB: "
            "make several calls, or open path direct or triton-shm: client.explain(model) says why they are closed",
        )
    return _staged(core, InlineCall(core.codec, settings, known, layout, wanted, output_devices), given)


def inline_instead(core: Core, settings: CallSettings, known: KnownModel, error: NoSharedMemoryError) -> Steps[None]:
    """Have a call go inline, as the machine has no shared memory for it; raise the error if it must not."""
    if settings.path != "auto":
        raise error
    try:
        yield from core.paths.choose(known, InlineCall.path, settings.deadline)
    except PathUnavailableError:
        raise error from None
    if not known.is_short_of_memory:
        known.is_short_of_memory = True
        _LOG.warning("a call of model %r takes the path inline: %s", known.spec.name, error)


def _direct(core: Core, plan: Plan, kind: type[DirectCall]) -> Steps[DirectCall]:
    """Take memory for a call of the direct path on the host: beside others like it, or by itself."""
    settings, known, layout, _, wanted, output_devices = plan
    row = None
    if known.spec.has_batcher:
        last = known.last
        is_expected = kind is PreparedDirectCall or (last is not None and last[0]() is not None and last[1] == layout)
        row = yield from take_row(core.pool, core.once, plan, is_expected=is_expected)
    if row is not None:
        layout, region, slot, memory = row.layout, row.region, row.slot, row.memory
    else:
        need = Need(layout.end - known.data_begin, 1, known.record_byte_size, kind=known.kind)
        region, memory = core.pool.take_idle(need, settings.origin) or (yield from wait_for(core.pool, settings, need))
        slot = region.slots[0]
        if region.data_offset != known.data_begin:  # one of several calls that lie in one region
            layout = layout.moved(region.data_offset - known.data_begin)
    call = kind(core.codec, settings, known, layout, wanted, output_devices, region, slot, memory)
    known.last = weakref.ref(call), plan.layout
    return call


def _staged(core: Core, call: Call, given: Mapping[str, AnyInput]) -> Call:
    """Return a call that takes inputs on GPUs, too, where there are such."""
    if any(each.device is not None for each in given.values()):
        call.gpus = StagedOnGpus(core.gpus, given, call.settings)
        call.library = call.gpus.library
    return call


def _on_gpus(core: Core, plan: Plan, kind: type[DirectCall]) -> Steps[DirectCall]:
    settings, known, layout, given, wanted, output_devices = plan
    region, memory = yield from take_with_devices(core.pool, core.gpus, plan)
    gpus = CallOnGpus(core.gpus, region, plan, is_prepared=kind is PreparedDirectCall)
    for name, source in inputs_on_gpus(given).items():
        if source.byte_size >= max(core.gpus.lend_bytes, 1) and source.obstacle:
            tell_gpu_copy(known, name, source.obstacle, settings.origin)
    layout, slot = layout._replace(table=gpus.table), region.slots[0]
    call = kind(core.codec, settings, known, layout, wanted, output_devices, region, slot, memory, gpus.buffers)
    call.gpus, call.library = gpus, gpus.library
    return call
