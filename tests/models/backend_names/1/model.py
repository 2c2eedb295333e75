"""Tells what Triton's two modules have, as JSON: every name with its kind, its signature and its value.

What is compiled has no signature, but a first line of its docstring that says it.
"""

from __future__ import annotations

import inspect
import json
from types import FunctionType, ModuleType
from typing import Any

import c_python_backend_utils
import numpy as np
import triton_python_backend_utils as pb_utils

from shm_backend_utils.model import Call, ShmSession

MODULES = (pb_utils, c_python_backend_utils)


def names_in(owner: object) -> list[str]:
    return [name for name, value in vars(owner).items() if not isinstance(value, ModuleType)]


NAMES_AT_IMPORT = {module.__name__: names_in(module) for module in MODULES}


def facts_of(owner: object, name: str) -> dict[str, Any]:
    static, value = inspect.getattr_static(owner, name), getattr(owner, name)
    if isinstance(value, type):
        return {"kind": "class", "names": {inner: facts_of(value, inner) for inner in names_in(value)}}
    if isinstance(value, FunctionType):
        return {"kind": "function", "signature": f"{name}{inspect.signature(value)}"}
    if callable(value):
        return {"kind": "function", "signature": (value.__doc__ or "").partition("\n")[0]}
    return {"kind": "property" if type(static) is property else "value", "value": repr(value)}


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self.session = ShmSession.from_args(args)

    def execute(self, requests: list[pb_utils.InferenceRequest]) -> list[pb_utils.InferenceResponse]:
        return self.session.serve(requests, self.infer)

    def infer(self, call: Call) -> None:
        report = {
            "at import": NAMES_AT_IMPORT,
            "now": {module.__name__: {name: facts_of(module, name) for name in names_in(module)} for module in MODULES},
        }
        call.put("REPORT", np.frombuffer(json.dumps(report).encode(), np.uint8))

    def finalize(self) -> None:
        self.session.close()
