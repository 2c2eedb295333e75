"""How ``triton_python_backend_utils`` behaves: model code that asserts it, for the emulator and for real stubs.

A check is a function ``check_...(pb_utils, request)``; those that begin with ``decoupled_check_`` run in a decoupled
model, and end their stream. Each gets a request with the same inputs, described in the tests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from . import calls, capsules, configurations, functions, metrics, numpy_1_stub, requests, responses, strings, tensors

_MODULES: Final = (calls, capsules, configurations, functions, metrics, requests, responses, strings, tensors)
CHECKS: Final[dict[str, Callable[[Any, Any], None]]] = {
    f"{module.__name__.rpartition('.')[2]}.{name}": check
    for module in _MODULES
    for name, check in vars(module).items()
    if name.startswith(("check_", "decoupled_check_"))
}
"""By the module and the name."""

FAULT_CHECKS: Final[dict[str, Callable[[Any, Any], None]]] = {
    name: check for name, check in vars(numpy_1_stub).items() if name.startswith("fault_check_")
}
"""Those for NumPy 2 in a stub that was built for NumPy 1; model ``checks`` answers them with an error, the report."""
