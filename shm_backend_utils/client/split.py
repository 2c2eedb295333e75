"""Batches larger than the model's: cut into requests that run side by side, and put together in place."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import CallerError, PeerError, ShmError
from ..memory.managed import array_at
from ..protocol.region_layout import MAX_SLOT_COUNT
from .berth import Berth
from .copying import LongCopy
from .demand import Demand, Outputs
from .direct import DirectExchange
from .engine import Engine, OpenCall
from .models import KnownModel
from .plan import CallPlan, rows_of
from .result import Result
from .sources import Source

__all__ = ["infer_split"]


async def infer_split(engine: Engine, demand: Demand, inputs: Mapping[str, Any], outputs: Outputs) -> Result:
    """Run the model on a batch of any size.

    On the direct path all requests share one slot, which the inputs are copied to once, and their outputs lie one after
    another in it: the result is a view. On other paths each request's outputs are copied to where they belong.
    """
    known, given, plan = await engine.look_at(demand, inputs, outputs, KnownModel.plan_of_any_size)
    if plan.devices:
        raise CallerError("split=True takes tensors on the host alone; call the model once for each batch")
    ranges = _ranges(plan.batch_size, known.spec.max_batch_size)
    if len(ranges) <= 1:
        return await engine.finish(await engine.begin(demand, inputs, outputs))
    path = await engine.paths.choose(known, demand.path, demand.left_s)
    if path == DirectExchange.path and not plan.strings and len(ranges) <= MAX_SLOT_COUNT:
        result = await _in_one_slot(engine, demand, known, given, plan, ranges)
        if isinstance(result, ShmError):
            raise result
        if result is not None:
            return result
    return await _one_by_one(engine, demand, given, plan, ranges, outputs)


async def _in_one_slot(
    engine: Engine,
    demand: Demand,
    known: KnownModel,
    given: Mapping[str, Source],
    plan: CallPlan,
    ranges: Sequence[range],
) -> Result | ShmError | None:
    """Return the result, or what went wrong; None if no part of it has run, and another way may do."""
    slot, memory = await engine.berths.take_slot(demand, plan.byte_size, len(ranges), DirectExchange.path)
    await LongCopy(given, slot.input_arrays(plan, memory), memory).run(engine.runtime)
    parts = [rows_of(plan, rows.start, rows.stop, plan.signature) for rows in ranges]
    calls = [
        OpenCall(demand, known, DirectExchange(engine.transport, demand.options, Berth(slot, turn, part, memory)))
        for part, turn in zip(parts, slot.turns, strict=False)
    ]

    async def outcome(call: OpenCall) -> Result | ShmError:
        with contextlib.closing(call.exchange):  # an error that somebody keeps must not keep the slot
            try:
                return await engine.send(call, demand.left_s)
            except ShmError as error:
                return error

    outcomes = await engine.runtime.gather([outcome(call) for call in calls])
    failed = [(call, error) for call, error in zip(calls, outcomes, strict=True) if isinstance(error, ShmError)]
    if failed:
        call, error = failed[0]
        none_ran = len(failed) == len(calls) and all(call.exchange.did_not_start(error) for call, error in failed)
        if none_ran and await engine.repair(call, error, 0) is not None:
            engine.tally.retried()
            return None
        return error
    results = [result for result in outcomes if isinstance(result, Result)]
    arrays = {name: _joined(name, [result[name] for result in results], memory) for name in results[0]}
    avoided = sum(result.bytes_avoided for result in results)
    return Result(arrays, DirectExchange.path, results[0].response, bytes_avoided=avoided)


async def _one_by_one(
    engine: Engine,
    demand: Demand,
    given: Mapping[str, Source],
    plan: CallPlan,
    ranges: Sequence[range],
    outputs: Outputs,
) -> Result:
    """Make independent requests, and copy their outputs into arrays for the whole."""
    whole_inputs = {name: _whole(source) for name, source in given.items()}
    whole: dict[str, npt.NDArray[Any]] = {}
    wanted = None if outputs is None else tuple(outputs)  # hints are for the whole

    async def part(rows: range) -> Result:
        inputs = {name: array[rows.start : rows.stop] for name, array in whole_inputs.items()}
        result = await engine.finish(await engine.begin(demand, inputs, wanted))
        with result:
            for name, array in result.items():
                target = whole.setdefault(name, np.empty((ranges[-1].stop, *array.shape[1:]), array.dtype))
                _check_is_alike(name, array, target)
                target[rows.start : rows.stop] = array
        return result

    results = await engine.runtime.gather([part(rows) for rows in ranges])
    avoided = sum(result.bytes_avoided for result in results)
    return Result(whole, results[0].path, results[0].response, bytes_avoided=avoided)


def _ranges(row_count: int | None, most: int) -> list[range]:
    if row_count is None:
        return []
    return [range(begin, min(begin + most, row_count)) for begin in range(0, row_count, most)]


def _whole(source: Source) -> npt.NDArray[Any]:
    if len(source.parts) == 1:
        return source.parts[0]
    array: npt.NDArray[Any] = np.empty(source.shape, source.dtype)
    source.write_to(array)
    return array


def _joined(name: str, parts: Sequence[npt.NDArray[Any]], memory: npt.NDArray[np.uint8]) -> npt.NDArray[Any]:
    """Return the parts as one array: a view where they lie one after another in the slot, else a copy."""
    for part in parts:
        _check_is_alike(name, part, parts[0])
    addresses = [_address(part) for part in parts]
    ends = [address + part.nbytes for address, part in zip(addresses, parts, strict=True)]
    first = addresses[0] - _address(memory)
    if ends[:-1] == addresses[1:] and first >= 0 and ends[-1] <= _address(memory) + memory.nbytes:
        shape = (sum(len(part) for part in parts), *parts[0].shape[1:])
        view = array_at(memory, first, parts[0].dtype, shape, memory.nbytes - first)
        assert view is not None
        return view
    return np.concatenate(parts)


def _check_is_alike(name: str, part: npt.NDArray[Any], other: npt.NDArray[Any]) -> None:
    if part.shape[1:] != other.shape[1:] or part.dtype != other.dtype:
        raise PeerError(
            f"parts of a split call gave output {name!r} the shapes {list(part.shape)} and {list(other.shape)}, "
            "which cannot be put together; call the model once for each batch"
        )


def _address(array: npt.NDArray[Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
