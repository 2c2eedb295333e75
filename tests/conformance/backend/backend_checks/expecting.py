"""What checks say, and what they expect of a call that is refused."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

_Check = TypeVar("_Check", bound=Callable[..., Any])

NUMBERS = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
"""NumPy's names of all types of numbers that Triton has, but for bool."""
FREES_SAFELY = "2.73" if sys.version_info[:2] == (3, 12) else "2"
"""The stub of 2.51 for Python 3.12 frees tensors without the GIL, and may die of it."""


def since(triton: str) -> Callable[[_Check], _Check]:
    """Say which version of Triton first behaves like this."""

    def mark(check: _Check) -> _Check:
        check.since = triton  # type: ignore[attr-defined]
        return check

    return mark


def kills_the_server(check: _Check) -> _Check:
    """Say that real servers die of it at times, or tell garbage: the stub frees an error before it reads its text."""
    check.kills_the_server = True  # type: ignore[attr-defined]
    return check


def refused(
    kind: type[BaseException], text: str | None, call: Callable[..., object], *given: Any, **options: Any
) -> None:
    """Check that a call raises an error with exactly this text; None for one of the stub's own on argument types."""
    try:
        found = call(*given, **options)
    except kind as error:
        said = str(error)
        if text not in (None, said):
            raise AssertionError(f"it says {said!r}; expected {text!r}") from error
        return
    raise AssertionError(f"expected {kind.__name__} {text!r}; it returned {found!r}")


def same(found: object, expected: object) -> None:
    assert type(found) is type(expected), f"found {found!r}, a {type(found)}; expected {expected!r}"
    assert found == expected, f"found {found!r}; expected {expected!r}"


def named(request: Any, name: str) -> Any:
    return next(tensor for tensor in request.inputs() if tensor.name() == name)
