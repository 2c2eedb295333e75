"""Batches larger than the model's: cut into requests that run side by side, and put together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import CallerError, PeerError
from ..protocol.call_layout import CallLayout
from .calls import infer
from .core import Core
from .errors import out_of_time
from .inputs.sources import Outputs, Source, sources, wanted_outputs
from .known_model import KnownModel
from .result import Result
from .settings import CallSettings
from .steps import Steps, Together

__all__ = ["infer_split"]


def infer_split(core: Core, settings: CallSettings, inputs: Mapping[str, Any], outputs: Outputs) -> Steps[Result]:
    """Run the model on a batch of any size. Each part is a call; outputs are copied into arrays for the whole."""
    wanted, devices = wanted_outputs(outputs)

    def look(known: KnownModel) -> tuple[dict[str, Source], CallLayout]:
        given = sources(known.spec, inputs, core.on_gpus)
        return given, known.lay_out(given, wanted, output_devices=devices, is_one_request=False)

    known, (given, whole) = yield from core.fitting(settings, look)
    if whole.devices or whole.lent:
        raise CallerError("split=True takes only tensors on the host; call the model once for each batch")
    ranges = _ranges(whole.batch_size, known.spec.max_batch_size)
    if len(ranges) <= 1:
        return (yield from infer(core, settings, given, wanted))
    if known.spec.sequences:
        raise CallerError(f"model {known.spec.name!r} takes sequences, one request after another; leave split out")
    parts = {name: source.parts for name, source in given.items()}
    whole_inputs = {name: each[0] if len(each) == 1 else np.concatenate(each) for name, each in parts.items()}
    found: dict[str, npt.NDArray[Any]] = {}
    most, rows_of_whole = len(ranges[0]), ranges[-1].stop
    share = (
        None
        if wanted is None
        else {  # the user's hints are for the whole batch
            name: None if size is None else -(-size * most // rows_of_whole) for name, size in wanted.items()
        }
    )

    def part(rows: range) -> Steps[Result]:
        inputs = {name: array[rows.start : rows.stop] for name, array in whole_inputs.items()}
        result = yield from infer(core, settings, inputs, share)
        with result:
            for name, array in result.items():
                target = found.setdefault(name, np.empty((ranges[-1].stop, *array.shape[1:]), array.dtype))
                _check_fits(name, array, (len(rows), *target.shape[1:]), target.dtype)
                target[rows.start : rows.stop] = array
        return result

    try:
        results = yield Together([part(rows) for rows in ranges], settings.deadline)
    except TimeoutError:
        raise out_of_time("some of its parts waited for a thread", "these were not sent") from None
    avoided = sum(each.bytes_avoided for each in results)
    in_response = tuple(name for name in found if any(name in each.in_response for each in results))
    return Result(found, results[0].path, results[0].read_response, bytes_avoided=avoided, in_response=in_response)


def _ranges(row_count: int | None, most: int) -> list[range]:
    if row_count is None:
        return []
    return [range(begin, min(begin + most, row_count)) for begin in range(0, row_count, most)]


def _check_fits(name: str, part: npt.NDArray[Any], shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    if part.shape != shape or part.dtype != dtype:
        raise PeerError(
            f"a part of a split call gave output {name!r} as {part.dtype} of shape {list(part.shape)}, but the parts "
            f"before need {dtype} of shape {list(shape)}; call the model once for each batch"
        )
