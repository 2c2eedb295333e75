"""Functions that find tensors and configurations by their names, and data types by theirs."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from .request import InferenceRequest
from .response import InferenceResponse
from .tensor import Tensor

__all__ = [
    "TRITON_STRING_TO_NUMPY",
    "get_input_config_by_name",
    "get_input_tensor_by_name",
    "get_output_config_by_name",
    "get_output_tensor_by_name",
    "numpy_to_triton_type",
    "triton_string_to_numpy",
    "triton_to_numpy_type",
    "using_decoupled_model_transaction_policy",
]

TRITON_STRING_TO_NUMPY: Final[dict[str, Any]] = {
    "TYPE_BOOL": bool,
    "TYPE_UINT8": np.uint8,
    "TYPE_UINT16": np.uint16,
    "TYPE_UINT32": np.uint32,
    "TYPE_UINT64": np.uint64,
    "TYPE_INT8": np.int8,
    "TYPE_INT16": np.int16,
    "TYPE_INT32": np.int32,
    "TYPE_INT64": np.int64,
    "TYPE_FP16": np.float16,
    "TYPE_FP32": np.float32,
    "TYPE_FP64": np.float64,
    "TYPE_STRING": np.object_,
}
"""NumPy's types by the configuration's names; BF16 has none."""

_BY_NUMBER: Final[Mapping[int, Any]] = MappingProxyType(
    dict(enumerate((np.bool_, *list(TRITON_STRING_TO_NUMPY.values())[1:]), 1))
)


def get_input_tensor_by_name(inference_request: InferenceRequest, name: str) -> Tensor | None:
    """Return an input of a request; None if it has none of this name."""
    return next((tensor for tensor in inference_request.inputs() if tensor.name() == name), None)


def get_output_tensor_by_name(inference_response: InferenceResponse, name: str) -> Tensor | None:
    """Return an output of a response; None if it has none of this name."""
    return next((tensor for tensor in inference_response.output_tensors() if tensor.name() == name), None)


def get_input_config_by_name(model_config: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """Return what a model's configuration says of an input; None if it has none of this name."""
    return _named(model_config, "input", name)


def get_output_config_by_name(model_config: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """Return what a model's configuration says of an output; None if it has none of this name."""
    return _named(model_config, "output", name)


def using_decoupled_model_transaction_policy(model_config: Mapping[str, Any]) -> bool:
    """Return whether a model's configuration says that it is decoupled."""
    policy: Mapping[str, bool] = model_config.get("model_transaction_policy", {"decoupled": False})
    return policy["decoupled"]


def triton_to_numpy_type(data_type: int) -> Any:
    """Return NumPy's type for the number of one of Triton's; None if there is none."""
    return _BY_NUMBER.get(data_type)


def numpy_to_triton_type(data_type: Any) -> int | None:
    """Return the number of Triton's type for one of NumPy's; None if there is none."""
    found = next((number for number, numpy in _BY_NUMBER.items() if data_type == numpy), None)
    return 13 if found is None and data_type == np.bytes_ else found


def triton_string_to_numpy(triton_type_string: str) -> Any:
    """Return NumPy's type for one of the configuration's names; raises KeyError if there is none."""
    return TRITON_STRING_TO_NUMPY[triton_type_string]


def _named(model_config: Mapping[str, Any], side: str, name: str) -> dict[str, Any] | None:
    return next((found for found in model_config.get(side, ()) if found["name"] == name), None)
