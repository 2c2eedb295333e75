"""Reads a config.pbtxt with protobuf, and checks its inputs and outputs as the server does."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from ..dtypes import BY_CONFIG
from ..errors import ModelError
from .files import CONFIG_FILE, read_source

__all__ = ["check_tensors", "read_config"]

_ANY_SIZE: Final = -1
_PLACE: Final = re.compile(r"^\d+:\d+ : ")
_NO_FIELD: Final = re.compile(r'Message type "inference\.([\w.]+)" has no field named "([^"]*)"')
_CONFIG_TYPES: Final = {
    **{other.lower(): name for name, row in BY_CONFIG.items() for other in (row.name, row.numpy.name)},
    **{"int": "TYPE_INT32", "float": "TYPE_FP32", "double": "TYPE_FP64"},
}
"""The configuration's types, by the names that requests, NumPy and C have for them."""
_NO_VALUE: Final = re.compile(r'Enum type "inference\.([\w.]+)" has no value named ([\w-]+)')


def read_config(folder: Path) -> Any:
    """Return the ``ModelConfig`` of a model's folder, empty without a file; ModelError if it is invalid."""
    file = folder / CONFIG_FILE
    config = model_config_pb2.ModelConfig()
    if not file.exists():
        return config
    try:
        text = read_source(file).decode()
    except UnicodeDecodeError as error:
        raise ModelError(f"{file}: byte {error.start} is not UTF-8; save the file as UTF-8") from None
    try:
        text_format.Parse(text, config)
    except text_format.ParseError as error:
        message = _PLACE.sub("", str(error))
        line, column = error.GetLine() or 1, error.GetColumn() or 1
        raise ModelError(f"{file}:{line}:{column}: {message}{_remedy(message)}") from None
    return config


def check_tensors(config: Any) -> None:
    """Check inputs and outputs as the server does after ``auto_complete_config``; ModelError if one is wrong."""
    for side in ("input", "output"):
        for tensor in getattr(config, side):
            message = f"model {side} " + (f"'{tensor.name}' " if tensor.name else "")
            reason = _obstacle(tensor, config.max_batch_size)
            if reason is not None:
                raise ModelError(f"{message}{reason} for {config.name}; see {side} in {CONFIG_FILE}")


def _remedy(message: str) -> str:
    field, value = _NO_FIELD.search(message), _NO_VALUE.search(message)
    if field is not None:
        known = [each.name for each in _descriptor(field[1]).fields]
        return _meant(field[2], known)
    if value is not None:
        meant = _CONFIG_TYPES.get(value[2].removeprefix("TYPE_").lower(), value[2])
        return _meant(meant, [each.name for each in _descriptor(value[1]).values])
    return "; expected protobuf's text format of inference.ModelConfig, see Triton's model_configuration.md"


def _meant(found: str, known: list[str]) -> str:
    close = difflib.get_close_matches(found, known, n=1)
    return f" Did you mean {close[0]}?" if close else f" Expected one of {', '.join(known)}."


def _descriptor(name: str) -> Any:
    """Return the descriptor of a message or enum, whose name may be nested: ``ModelInput.Format``."""
    first, *nested = name.split(".")
    file = model_config_pb2.DESCRIPTOR
    found = file.message_types_by_name.get(first) or file.enum_types_by_name[first]
    for each in nested:
        found = found.nested_types_by_name.get(each) or found.enum_types_by_name[each]
    return found


def _obstacle(tensor: Any, max_batch_size: int) -> str | None:
    sizes = "integer >= 1, or -1 to indicate a variable-size dimension"
    reshape = tuple(tensor.reshape.shape) if tensor.HasField("reshape") else None
    checks = (
        (not tensor.name, "must specify 'name'"),
        (tensor.data_type == model_config_pb2.TYPE_INVALID, "must specify 'data_type'"),
        (not tensor.dims, "must specify 'dims'"),
        (
            reshape == () and max_batch_size == 0,
            "cannot have empty reshape for non-batching model as scalar tensors are not supported",
        ),
        (_has_bad_size(tensor.dims), f"dimension must be {sizes}"),
        (_has_bad_size(reshape or ()), f"reshape dimensions must be {sizes}"),
        (reshape is not None and _parts(tensor.dims) != _parts(reshape), "has different size for dims and reshape"),
        (tensor.is_shape_tensor, "is a shape tensor, which are only supported for TensorRT platform"),
        (
            tensor.is_non_linear_format_io,
            "has a non-linear IO format, which is only supported for the TensorRT platform",
        ),
    )
    return next((reason for is_wrong, reason in checks if is_wrong), None)


def _has_bad_size(sizes: Iterable[int]) -> bool:
    return any(size < 1 and size != _ANY_SIZE for size in sizes)


def _parts(sizes: Iterable[int]) -> list[int]:
    """Return the products of the fixed sizes between dimensions of any size."""
    parts: list[list[int]] = [[]]
    for size in sizes:
        if size == _ANY_SIZE:
            parts.append([])
        else:
            parts[-1].append(size)
    return [math.prod(part) for part in parts]
