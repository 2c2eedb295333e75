"""Warnings of outputs that differ from config.pbtxt, which a server sends without a word."""

from __future__ import annotations

import warnings
from typing import Any, Final

from ...protocol.address import SLOT_PARAMETER
from ...protocol.named import PARAMETER
from .model_config import datatype_of
from .requests import Delivery, Outcome

__all__ = ["warn_of_outputs"]

_ANY_SIZE: Final = -1
_ELSEWHERE: Final = frozenset({SLOT_PARAMETER, PARAMETER})


def warn_of_outputs(config: Any, delivery: Delivery, outcome: Outcome, *, stacklevel: int) -> None:
    """Warn of outputs that a response lacks, or that have another data type or shape than the model declares.

    A request that says where in shared memory its outputs go has none to come, nor has a decoupled model; a response
    with an error has none to warn of. ``stacklevel`` counts from here.
    """
    if outcome.error is not None:
        return
    given = {tensor.name: tensor for tensor in outcome.outputs}
    is_complete = config.model_transaction_policy.decoupled or not _ELSEWHERE.isdisjoint(delivery.parameters)
    for name in () if is_complete else delivery.requested_output_names:
        if name not in given:
            warnings.warn(
                f"model {config.name!r} answered without output {name!r}, and a server says nothing of it: give a "
                "pb_utils.Tensor of that name, spelled as in config.pbtxt",
                stacklevel=stacklevel,
            )
    for declared in config.output:
        if declared.name not in given:
            continue
        tensor = given[declared.name]
        datatype, dims = datatype_of(declared), _dims(declared, config.max_batch_size)
        fits = len(dims) == len(tensor.shape) and all(
            dim in (_ANY_SIZE, size) for dim, size in zip(dims, tensor.shape, strict=True)
        )
        if tensor.datatype != datatype or not (fits or declared.HasField("reshape")):
            warnings.warn(
                f"output {tensor.name!r} of model {config.name!r} is {tensor.datatype} {list(tensor.shape)}, but "
                f"config.pbtxt declares {datatype} {list(dims)}, and a server sends it so: mend one of the two",
                stacklevel=stacklevel,
            )


def _dims(declared: Any, max_batch_size: int) -> tuple[int, ...]:
    return (_ANY_SIZE, *declared.dims) if max_batch_size > 0 else tuple(declared.dims)
