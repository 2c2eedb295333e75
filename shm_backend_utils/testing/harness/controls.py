"""The inputs that Triton adds to each request of a sequence, if a model's configuration has ``control_input``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ...dtypes import BYTES
from ...model_spec import TensorSpec
from .requests import Request

__all__ = ["control_inputs"]

_FLAGS: Final = {"CONTROL_SEQUENCE_START": 1, "CONTROL_SEQUENCE_END": 2}


def control_inputs(
    config: Any, controls: Mapping[str, TensorSpec], request: Request
) -> list[tuple[str, str, npt.NDArray[Any]]]:
    """Return name, data type and array of each that a request gets; ``config`` is the model's, completed."""
    found = []
    for tensor in config.sequence_batching.control_input:
        control, spec = tensor.control[0], controls[tensor.name]
        kind, dtype = control.Kind.Name(control.kind), spec.dtype
        assert dtype is not None  # the server loads no other
        is_so = kind not in _FLAGS or bool(request.flags & _FLAGS[kind])  # whatever comes at all is ready
        values = control.int32_false_true or control.fp32_false_true or control.bool_false_true
        number = request.sequence_id
        value: Any = values[is_so] if values else str(number).encode() if dtype is BYTES else number
        found.append((spec.name, dtype.name, np.full((1,) * len(spec.shape), value, dtype.numpy)))
    return found
