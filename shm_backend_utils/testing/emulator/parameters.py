"""The parameters of requests and responses, which are JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from .errors import TritonModelException

__all__ = ["to_json"]


def to_json(parameters: Mapping[str, Any] | None) -> str:
    """Return parameters as the stub writes them.

    TritonModelException if they are no dict, or a key is no str, or a value no bool, int or str.
    """
    if parameters is None:
        return "{}"
    if not isinstance(parameters, dict):
        raise TritonModelException(f"Expect N8pybind114dictE, got {type(parameters)}")
    for key, value in parameters.items():
        if not isinstance(key, str):
            raise TritonModelException(f"Expect parameters keys to have type str, found type {type(key)}")
        if not isinstance(value, str | int):
            raise TritonModelException(f"Expect parameters values to have type bool/int/str, found type {type(value)}")
    return json.dumps(parameters)
