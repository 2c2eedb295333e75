"""What the library itself takes: all of `execute`, less that of a bare model, and functions of a warm request.

The model takes the times itself, keeps them in its own memory, and tells them at the end. Requests come one after
another, so that it is known which time is whose. Functions are counted by sys.setprofile, on both sides.
"""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import tritonclient.grpc

import shm_backend_utils
from shm_backend_utils.cli.common.rounds import shuffled
from shm_backend_utils.client import ShmClient

from ...figures import Figure
from ..bench import Bench
from ..server import models_on_a_core_of_their_own

MODEL: Final = "timed_identity"
MODELS: Final = {1: MODEL, 8: "timed_identity_8"}
"""By the number of inputs, and of outputs."""
BARE_MODEL: Final = "timed_bare"
MOST_US: Final = {1: 40.0, 8: 80.0}
OTHER_SHAPES_OVER_REPEATED: Final = 1.15
ROUNDS_PER_ROUND: Final = 5
"""A request takes no time."""

Tensors = dict[str, npt.NDArray[np.float32]]


def tensors(count: int, number: int = 0) -> Tensors:
    """Return so many inputs; of another shape for every number, but of about 1 KiB each."""
    return {f"X{index}": np.full((8 + (number + index) % 97, 4), number, np.float32) for index in range(count)}


def own_time(bench: Bench) -> list[Figure]:
    """Measure `execute` where the models have a core of their own.

    Between two requests the caches are filled with the code of whatever else runs on the core, so it matters where.
    """
    with models_on_a_core_of_their_own(bench.server), bench.direct_client() as client:
        bare = bench.plain_client()
        try:
            return _figures(*_times_us(bench, client, bare))
        finally:
            bare.close()


def _times_us(bench: Bench, client: ShmClient, bare: Any) -> tuple[dict[str, list[float]], list[float]]:
    """Return what `execute` took by case, and in a bare model."""

    def send(number: int, count: int, *, is_varied: bool) -> None:
        inputs = tensors(count, number if is_varied else 48)
        outputs = {name.replace("X", "Y"): (array.shape, array.dtype) for name, array in inputs.items()}
        with client.infer(MODELS[count], inputs, outputs=outputs) as result:
            if result.path != "direct" or (result["Y0"] != inputs["X0"]).any():
                raise AssertionError(f"{MODELS[count]} does not give back its input on the direct path")

    cases: dict[str, Callable[[int], None]] = {}
    for count in MOST_US:
        cases[f"{count} same"] = lambda number, count=count: send(number, count, is_varied=False)  # type: ignore[misc]
        cases[f"{count} other"] = lambda number, count=count: send(number, count, is_varied=True)  # type: ignore[misc]
    for model in MODELS.values():
        _told(client, model)
    order: dict[int, list[tuple[str, int]]] = {count: [] for count in MODELS}
    rounds = ROUNDS_PER_ROUND * bench.amounts.rounds
    for number in bench.rounds_with_warm_up("own time in execute", rounds):
        for name in shuffled([*cases, BARE_MODEL], number):
            if name == BARE_MODEL:
                bare.infer(BARE_MODEL, [], parameters={"x": 1})
            else:
                cases[name](number)
                order[int(name[0])].append((name, number))
    times_us: dict[str, list[float]] = defaultdict(list)
    for count, model in MODELS.items():
        for (name, number), nanoseconds in zip(order[count], _told(client, model), strict=True):
            if number >= 0:
                times_us[name].append(nanoseconds / 1e3)
    ask = tritonclient.grpc.InferInput("ASK", [1], "INT64")
    ask.set_data_from_numpy(np.zeros(1, np.int64))
    bare_ns = bare.infer(BARE_MODEL, [ask]).as_numpy("TIMES_NS").tolist()
    return times_us, [nanoseconds / 1e3 for nanoseconds in bare_ns[-rounds:]]


def _told(client: ShmClient, model: str) -> list[int]:
    """Return what each `execute` of a model took since this was asked last; answering this does not count."""
    with client.infer(model, {}, outputs={"TIMES_NS": 8 * 2**16}) as result:
        told: list[int] = result["TIMES_NS"].tolist()
        return told


def _figures(times_us: dict[str, list[float]], bare_us: list[float]) -> list[Figure]:
    medians = {name: statistics.median(times) for name, times in times_us.items()}
    bare = statistics.median(bare_us)
    figures = [
        Figure(
            f"own time in execute, {count} in and {count} out",
            medians[f"{count} same"] - bare,
            "µs above a bare model's",
            f"{medians[f'{count} same']:.1f} µs - {bare:.1f} µs",
            at_most=limit_us,
        )
        for count, limit_us in MOST_US.items()
    ]
    for count in MOST_US:
        same, other = medians[f"{count} same"] - bare, medians[f"{count} other"] - bare
        figures.append(
            Figure(
                f"own time in execute, {count} in and {count} out, every request another shape",
                other / same,
                "× repeated shapes",
                f"{other:.1f} µs / {same:.1f} µs",
                at_most=OTHER_SHAPES_OVER_REPEATED,
            )
        )
    return figures


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
