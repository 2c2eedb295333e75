"""What Triton adds to each request of a sequence, where a model's configuration asks for it by ``control_input``."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
from tritonclient.grpc import model_config_pb2

from ...dtypes import BY_NAME, BYTES, from_config
from .requests import Request

__all__ = ["control_inputs"]

_VALUES: Final = (("int32_false_true", "INT32"), ("fp32_false_true", "FP32"), ("bool_false_true", "BOOL"))
_FLAGS: Final = {"CONTROL_SEQUENCE_START": 1, "CONTROL_SEQUENCE_END": 2}


def control_inputs(config: Any, request: Request) -> list[tuple[str, str, npt.NDArray[Any]]]:
    """Return name, data type and array of each that a request gets; ``config`` is the model's, completed."""
    shape, found = ((1, 1) if config.max_batch_size > 0 else (1,)), []
    for tensor in config.sequence_batching.control_input:
        control = tensor.control[0]
        kind = control.Kind.Name(control.kind)
        is_so = kind not in _FLAGS or bool(request.flags & _FLAGS[kind])  # whatever comes at all is ready
        dtype = from_config(model_config_pb2.DataType.Name(control.data_type))
        value: Any = str(request.sequence_id).encode() if dtype is BYTES else request.sequence_id
        for field, name in _VALUES:
            if getattr(control, field):
                dtype, value = BY_NAME[name], getattr(control, field)[is_so]
        assert dtype is not None  # the server loads no other
        found.append((tensor.name, dtype.name, np.array([value], dtype.numpy).reshape(shape)))
    return found
