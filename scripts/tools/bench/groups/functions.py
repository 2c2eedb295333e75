"""How many functions of the package a warm request goes through, on both sides: counted by sys.setprofile."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

import shm_backend_utils

from ...figures import Figure
from ..bench import Bench
from .own_time import MODEL, tensors

__all__ = ["functions", "functions_called", "named_functions"]

MOST_IN_EXECUTE: Final = 20
MOST_IN_INFER: Final = 25
_PACKAGE: Final = f"{Path(shm_backend_utils.__file__).parent}/"
_NO_FUNCTIONS: Final = ("<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>", "<module>")
_WARM_UP: Final = 20


def functions(bench: Bench) -> list[Figure]:
    """Count the functions, each once, of a request with one input and one output."""
    inputs = tensors(1)
    outputs = {"Y0": inputs["X0"].nbytes}
    with bench.direct_client() as client:

        def infer() -> None:
            with client.infer(MODEL, inputs, outputs=outputs) as result:
                if result.path != "direct":
                    raise AssertionError(f"{MODEL} is called on the path {result.path}, whose way is another one")

        for _ in range(_WARM_UP):
            infer()
        in_infer = functions_called(partial(client.infer, MODEL, inputs, outputs=outputs))  # a lambda here would count
        client.infer(MODEL, {}, outputs={"FUNCTIONS": 2**16}, parameters={"count_in_next": True}).release()
        infer()
        with client.infer(MODEL, {}, outputs={"FUNCTIONS": 2**16}) as result:
            lines = [line.decode().split("\t") for line in result["FUNCTIONS"].tolist()]
        in_execute = named_functions((file, name) for file, name in lines)
    counted = {"execute": (in_execute, MOST_IN_EXECUTE), "infer": (in_infer, MOST_IN_INFER)}
    figures = []
    for where, (names, most) in counted.items():
        modules = {name.partition(":")[0] for name in names}
        unit, basis = "functions of this package", f"in {len(modules)} modules"
        figures.append(Figure(f"a warm request's way in {where}", len(names), unit, basis, at_most=most))
        if bench.shows_functions:
            bench.say("\n".join([f"in {where}:", *[f"  {name}" for name in names]]))
    return figures


def functions_called(work: Callable[[], Any]) -> list[str]:
    """Return the functions of the package that this thread goes through in doing some work, in their order."""
    codes: dict[CodeType, None] = {}

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            codes[frame.f_code] = None

    sys.setprofile(note)
    try:
        result = work()
    finally:
        sys.setprofile(None)
    del result
    return named_functions((code.co_filename, getattr(code, "co_qualname", code.co_name)) for code in codes)


def named_functions(called: Iterable[tuple[str, str]]) -> list[str]:
    """Return ``module:function`` for those that are the package's; comprehensions are no functions."""
    return [
        f"{file.removeprefix(_PACKAGE).removesuffix('.py')}:{name}"
        for file, name in called
        if file.startswith(_PACKAGE) and not name.endswith(_NO_FUNCTIONS)
    ]
