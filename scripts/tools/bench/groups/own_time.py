"""The time of the library itself: `execute` less that of a bare model, `infer` less its connection, functions of both.

The model takes the times itself, keeps them in its own memory, and tells them at the end. Requests come one after
another, so that it is known which time is whose. Functions are counted by sys.setprofile, on both sides.
"""

from __future__ import annotations

import statistics
import sys
import time
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
from shm_backend_utils.client import Result, ShmClient

from ...figures import Figure
from ..bench import Bench, models_on_a_core_of_their_own

MODEL: Final = "timed_identity"
MODELS: Final = {1: MODEL, 8: "timed_identity_8"}
"""By the number of inputs, and of outputs."""
BARE_MODEL: Final = "timed_bare"
STRAIGHT_MODEL: Final = "timed_straight"
MOST_US: Final = {1: 40.0, 8: 80.0}
OTHER_SHAPES_OVER_REPEATED: Final = 1.15
OVER_STRAIGHT_CODE: Final = 1.10
ROUNDS_PER_ROUND: Final = 5  # a request takes no time

Tensors = dict[str, npt.NDArray[np.float32]]


def tensors(count: int, number: int = 0) -> Tensors:
    """Return so many inputs; of another shape for every number, but of about 1 KiB each."""
    return {f"X{index}": np.full((8 + (number + index) % 97, 4), number, np.float32) for index in range(count)}


def own_time(bench: Bench) -> list[Figure]:
    """Measure `execute` where the models have a core of their own: what else runs on it would fill the caches."""
    with models_on_a_core_of_their_own(bench.server), bench.direct_client() as client, bench.plain_client() as bare:
        return _figures(_times_us(bench, client, bare))


def _times_us(bench: Bench, client: ShmClient, bare: Any) -> dict[str, list[float]]:
    """Return what `execute` took by case, the models without a session under their own names."""

    def send(model: str, number: int, count: int, *, is_varied: bool) -> None:
        inputs = tensors(count, number if is_varied else 48)
        outputs = {name.replace("X", "Y"): (array.shape, array.dtype) for name, array in inputs.items()}
        with client.infer(model, inputs, outputs=outputs) as result:
            if result.path != "direct" or (result["Y0"] != inputs["X0"]).any():
                raise AssertionError(f"{model} does not give back its input on the direct path")

    cases: dict[str, tuple[str, Callable[[int], object]]] = {
        BARE_MODEL: (BARE_MODEL, lambda _: bare.infer(BARE_MODEL, [], parameters={"x": 1})),
        STRAIGHT_MODEL: (STRAIGHT_MODEL, partial(send, STRAIGHT_MODEL, count=1, is_varied=False)),
    }
    for count, model in MODELS.items():
        cases[f"{count} same"] = model, partial(send, model, count=count, is_varied=False)
        cases[f"{count} other"] = model, partial(send, model, count=count, is_varied=True)
    order: dict[str, list[tuple[str, int]]] = defaultdict(list)
    rounds = ROUNDS_PER_ROUND * bench.amounts.rounds
    for number in bench.rounds_with_warm_up("own time in execute", rounds):
        for name in shuffled(cases, number):
            model, case = cases[name]
            case(number)
            order[model].append((name, number))
    times_us: dict[str, list[float]] = defaultdict(list)
    ask = tritonclient.grpc.InferInput("ASK", [1], "INT64").set_data_from_numpy(np.zeros(1, np.int64))
    wanted = tritonclient.grpc.InferRequestedOutput("TIMES_NS")
    for model, sent in order.items():
        asking = [] if model in MODELS.values() else [ask]  # without an input, such a model looks at what is wanted
        times = bare.infer(model, asking, outputs=[wanted]).as_numpy("TIMES_NS").tolist()[-len(sent) :]
        for (name, number), nanoseconds in zip(sent, times, strict=True):
            if number >= 0:
                times_us[name].append(nanoseconds / 1e3)
    return times_us


def _figures(times_us: dict[str, list[float]]) -> list[Figure]:
    medians = {name: statistics.median(times) for name, times in times_us.items()}
    bare = medians[BARE_MODEL]
    names = {count: f"own time in execute, {count} in and {count} out" for count in MOST_US}
    figures = []
    for count, name in names.items():
        whole, unit = medians[f"{count} same"], "µs above a bare model's"
        basis = f"{whole:.1f} µs - {bare:.1f} µs"
        figures.append(Figure(name, whole - bare, unit, basis, at_most=MOST_US[count]))
    own, straight = medians["1 same"] - bare, medians[STRAIGHT_MODEL] - bare
    basis = f"{own:.1f} µs / {straight:.1f} µs"
    figures.append(Figure(names[1], own / straight, "× straight code", basis, at_most=OVER_STRAIGHT_CODE))
    for count, name in names.items():
        same, other = medians[f"{count} same"] - bare, medians[f"{count} other"] - bare
        varied, basis = f"{name}, every request another shape", f"{other:.1f} µs / {same:.1f} µs"
        limit = OTHER_SHAPES_OVER_REPEATED
        figures.append(Figure(varied, other / same, "× repeated shapes", basis, at_most=limit))
    return figures


MOST_OF_INFER_US: Final = 130.0


class TimedTransport:
    """A connection that knows how long its user has waited for it."""

    def __init__(self, inner: Any) -> None:
        self.waited_s = 0.0
        self._inner = inner

    def send(self, message: Any, timeout_s: float) -> Any:
        begin = time.perf_counter()
        try:
            return self._inner.send(message, timeout_s)
        finally:
            self.waited_s += time.perf_counter() - begin

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def infer_time(bench: Bench) -> list[Figure]:
    x = np.ones(16, np.float32)
    with bench.direct_client() as client, client.prepare(IDENTITY, {"INPUT0": (x.shape, x.dtype)}) as call:
        transport = client._driver.transport = TimedTransport(client._driver.transport)  # type: ignore[assignment]
        calls = {"ShmClient.infer": lambda: client.infer(IDENTITY, {"INPUT0": x}), "PreparedCall.infer": call.infer}
        unit, rounds = "µs beside its connection's", 2 * ROUNDS_PER_ROUND * bench.amounts.rounds
        own_us = {name: _own_us(transport, infer, rounds) for name, infer in calls.items()}
    limit = MOST_OF_INFER_US
    return [Figure(f"{name}, own time, 64 B", us, unit, "", at_most=limit) for name, us in own_us.items()]


def _own_us(transport: TimedTransport, infer: Callable[[], object], rounds: int) -> float:
    taken = []
    for _ in range(rounds):
        transport.waited_s = 0.0
        begin = time.perf_counter()
        infer()
        taken.append(time.perf_counter() - begin - transport.waited_s)
    return statistics.median(taken) * 1e6


MOST_FUNCTIONS: Final = 15
README_MODEL: Final = "counted_multiply"  # README's `multiply`, as it stands there
IDENTITY: Final = "identity"
_WIRE: Final = ("client/transports/connections:", "client/transports/conversation:", "client/transports/grpc/http2:")
_PACKAGE: Final = f"{Path(shm_backend_utils.__file__).parent}/"
_NO_FUNCTIONS: Final = ("<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>", "<module>")
_WARM_UP: Final = 20


def functions(bench: Bench) -> list[Figure]:
    """Count the functions, each once, of a request to README's own model, and of those to an identity."""
    called: dict[str, list[str]] = {}
    with bench.direct_client() as client:
        x = np.ones((8, 3, 224, 224), np.float32)
        outputs = {"OUTPUT0": x.nbytes}
        called["infer of README's multiply"] = _in_infer(client, README_MODEL, x, outputs)
        with client.infer(README_MODEL, {"INPUT0": x[:1]}, outputs={"FUNCTIONS": 2**16}) as result:
            lines = [line.decode().split("\t") for line in result["FUNCTIONS"].ravel().tolist()]
        called["execute of README's multiply"] = named_functions((file, name) for file, name in lines)
        small = np.ones(256, np.float32)
        outputs = {"OUTPUT0": small.nbytes}
        called["infer of an identity"] = _in_infer(client, IDENTITY, small, outputs)
        with client.prepare(IDENTITY, {"INPUT0": (small.shape, small.dtype)}) as call:
            called["infer of a prepared identity"] = _in_warm(call.infer, "direct")
    with ShmClient(bench.server.grpc_url) as client:
        called["infer of an identity, in band"] = _in_infer(client, IDENTITY, small, outputs, "inline")
    figures = []
    for where, names in called.items():
        count = sum(not name.startswith(_WIRE) for name in names)
        name, unit = f"a warm request's way in {where}", "functions of this package"
        wire = f"and {len(names) - count} of the connection"
        figures.append(Figure(name, count, unit, wire, at_most=MOST_FUNCTIONS))
        if count > MOST_FUNCTIONS:
            bench.say("\n".join([f"in {where}:", *[f"  {name}" for name in names]]))
    return figures


def _in_infer(
    client: ShmClient, model: str, x: npt.NDArray[np.float32], outputs: dict[str, int], path: str = "direct"
) -> list[str]:
    return _in_warm(partial(client.infer, model, {"INPUT0": x}, outputs=outputs), path)  # a lambda would count


def _in_warm(infer: Callable[[], Result], path: str) -> list[str]:
    for _ in range(_WARM_UP):
        with infer() as result:
            if result.path != path:
                raise AssertionError(f"a call took the path {result.path}, whose way is another one")
    return functions_called(infer)


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
