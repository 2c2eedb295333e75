"""Tells the names in Triton's two modules and their classes, as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import ModuleType

import c_python_backend_utils
import numpy as np
import triton_python_backend_utils as pb_utils

from shm_backend_utils.model import Call
from tests.served import Served


def names_in(owner: object, prefix: str = "") -> Iterator[str]:
    for name, value in vars(owner).items():
        if not isinstance(value, ModuleType):
            yield prefix + name
        if isinstance(value, type):
            yield from names_in(value, f"{prefix}{name}.")


class TritonPythonModel(Served):
    def infer(self, call: Call) -> None:
        report = {module.__name__: list(names_in(module)) for module in (pb_utils, c_python_backend_utils)}
        call.put("REPORT", np.frombuffer(json.dumps(report).encode(), np.uint8))
