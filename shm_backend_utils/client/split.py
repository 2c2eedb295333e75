"""Batches larger than the model's: cut into requests that run side by side, and put together in place."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import CallerError, NoSharedMemoryError, PeerError, ShmError
from ..memory.managed import array_at
from ..protocol.call_layout import CallLayout, rows_of
from ..protocol.layout import MAX_SLOT_COUNT
from .calls import infer, repair, send
from .core import Core
from .errors import out_of_time
from .inputs.sources import Outputs, Source, StringSource, sources, wanted_outputs
from .known_model import KnownModel
from .paths.call import Call, Plan, write_inputs
from .paths.direct import DirectCall
from .paths.taking import take
from .result import Result
from .settings import CallSettings
from .steps import Steps, Together, forget_locals

__all__ = ["infer_split"]


def infer_split(core: Core, settings: CallSettings, inputs: Mapping[str, Any], outputs: Outputs) -> Steps[Result]:
    """Run the model on a batch of any size; on the direct path its parts lie one after another in one region."""
    wanted, devices = wanted_outputs(outputs)

    def look(known: KnownModel) -> tuple[dict[str, Source], CallLayout]:
        given = sources(known.spec, inputs, core.on_gpus)
        return given, known.lay_out(given, wanted, output_devices=devices, is_one_request=False)

    known, (given, whole) = yield from core.fitting(settings, look)
    if whole.devices or whole.lent:
        raise CallerError("split=True takes tensors on the host alone; call the model once for each batch")
    ranges = _ranges(whole.batch_size, known.spec.max_batch_size)
    if len(ranges) <= 1:
        return (yield from infer(core, settings, given, wanted))
    if known.spec.sequences:
        raise CallerError(f"model {known.spec.name!r} takes sequences, one request after another; leave split out")
    path = yield from core.path_of(known, settings, whole)
    has_strings = any(isinstance(source, StringSource) for source in given.values())
    if path == DirectCall.path and not has_strings and len(ranges) <= MAX_SLOT_COUNT:
        layout = known.lay_out(given, wanted, slot_count=len(ranges), is_one_request=False)
        result = yield from _in_one_region(core, Plan(settings, known, layout, given, wanted, {}), given, ranges)
        if result is not None:
            return result
        known = core.known.get((settings.model, settings.version), known)  # it may be another one by now
        ranges = _ranges(whole.batch_size, max(known.spec.max_batch_size, 1))
    return (yield from _one_by_one(core, settings, given, ranges, wanted))


def _in_one_region(
    core: Core, plan: Plan, given: Mapping[str, Source], ranges: Sequence[range]
) -> Steps[Result | None]:
    """Return the result; None if no part of it has run, and another way may do."""
    settings, known, layout, _, wanted, nowhere = plan
    try:
        region, memory = yield from take(core.pool, settings, known, layout.end, len(ranges), "direct, split")
    except NoSharedMemoryError:
        if settings.path != "auto":
            raise
        return None  # each part needs less, and may go inline
    of_all = core.codec, settings, known
    calls = [
        DirectCall(*of_all, rows_of(layout, known.spec, rows.start, rows.stop), wanted, nowhere, region, slot, memory)
        for rows, slot in zip(ranges, region.slots, strict=True)
    ]
    whole = DirectCall(*of_all, layout, wanted, nowhere, region, region.slots[0], memory)
    with contextlib.ExitStack() as at_end:
        for call in (whole, *calls):
            at_end.callback(call.close)
        yield from write_inputs(whole, given, settings)
        outcomes = yield from _together([_outcome(core, call) for call in calls], settings)
        failed = [(call, error) for call, error in zip(calls, outcomes, strict=True) if isinstance(error, ShmError)]
        if failed:
            call, error = failed[0]
            none_ran = len(failed) == len(calls) and all(call.did_not_start(error) for call, error in failed)
            if none_ran and (yield from repair(core, call, error, 0)) is not None:
                core.tally.retried()
                return None
            raise error
    results = [result for result in outcomes if isinstance(result, Result)]
    arrays = {name: _joined(name, [result[name] for result in results], memory) for name in results[0]}
    return _whole_result(arrays, results)


def _together(operations: list[Steps[Any]], settings: CallSettings) -> Steps[list[Any]]:
    try:
        return (yield Together(operations, settings.deadline))  # type: ignore[no-any-return]
    except TimeoutError:
        raise out_of_time("some of its parts waited for a thread", "these were") from None


def _outcome(core: Core, call: Call) -> Steps[Result | ShmError]:
    try:
        return (yield from send(core, call, call.settings.deadline))
    except ShmError as error:
        forget_locals(error)
        return error


def _one_by_one(
    core: Core,
    settings: CallSettings,
    given: Mapping[str, Source],
    ranges: Sequence[range],
    wanted: Mapping[str, int | None] | None,
) -> Steps[Result]:
    """Make independent requests, and copy their outputs into arrays for the whole."""
    parts = {name: source.parts for name, source in given.items()}
    whole_inputs = {name: each[0] if len(each) == 1 else np.concatenate(each) for name, each in parts.items()}
    whole: dict[str, npt.NDArray[Any]] = {}
    names = None if wanted is None else tuple(wanted)  # hints are for the whole

    def part(rows: range) -> Steps[Result]:
        inputs = {name: array[rows.start : rows.stop] for name, array in whole_inputs.items()}
        result = yield from infer(core, settings, inputs, names)
        with result:
            for name, array in result.items():
                target = whole.setdefault(name, np.empty((ranges[-1].stop, *array.shape[1:]), array.dtype))
                _check_is_alike(name, array, target)
                target[rows.start : rows.stop] = array
        return result

    results = yield from _together([part(rows) for rows in ranges], settings)
    return _whole_result(whole, results)


def _whole_result(arrays: dict[str, npt.NDArray[Any]], parts: Sequence[Result]) -> Result:
    avoided = sum(part.bytes_avoided for part in parts)
    in_response = tuple(name for name in arrays if any(name in part.in_response for part in parts))
    return Result(arrays, parts[0].path, parts[0].read_response, bytes_avoided=avoided, in_response=in_response)


def _ranges(row_count: int | None, most: int) -> list[range]:
    if row_count is None:
        return []
    return [range(begin, min(begin + most, row_count)) for begin in range(0, row_count, most)]


def _joined(name: str, parts: Sequence[npt.NDArray[Any]], memory: npt.NDArray[np.uint8]) -> npt.NDArray[Any]:
    """Return the parts as one array: a view where they lie one after another in the region, else a copy."""
    for part in parts:
        _check_is_alike(name, part, parts[0])
    begin, *addresses = [array.__array_interface__["data"][0] for array in (memory, *parts)]
    ends = [address + part.nbytes for address, part in zip(addresses, parts, strict=True)]
    first = addresses[0] - begin
    if ends[:-1] == addresses[1:] and first >= 0 and ends[-1] <= begin + memory.nbytes:
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
