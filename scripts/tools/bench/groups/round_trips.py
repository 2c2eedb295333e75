"""What round trips on the direct path take, what the client itself takes of them, and what a harness takes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Final

import numpy as np
import tritonclient.grpc
import tritonclient.http

from shm_backend_utils.cli.common.server import REPOSITORY
from shm_backend_utils.client import PreparedCall, ShmClient
from shm_backend_utils.testing.harness import ModelHarness

from ...figures import Figure
from ..bench import Bench
from ..ways import endless, repeated, varying

IDENTITY_BYTES: Final = {"64 B": 64, "1 MiB": 2**20, "128 MiB": 2**27, "1 GiB": 2**30}
BATCH: Final = (16, 3, 224, 224)
TIMEOUT_S: Final = 60.0
MOST_OF_EMPTY: Final = 1.0
MOST_OF_OWN_EMPTY: Final = 1.25
MOST_OF_EMPTY_THAT_MULTIPLIES: Final = 1.1

MODEL: Final = "identity"
LENGTH: Final = 16
MOST_US: Final = 130.0
SHAPES_BYTES: Final = 4096
OTHER_SHAPES_OVER_REPEATED: Final = 1.15
ROUNDS_PER_ROUND: Final = 10

LEAST_REQUESTS: Final = 5_000
_MODEL: Final = REPOSITORY / "identity"
_REQUESTS: Final = 5_000
_ROUNDS: Final = 5


def round_trips(bench: Bench) -> list[Figure]:
    """Measure them over both protocols."""
    return [figure for protocol in bench.urls for figure in _of_protocol(bench, protocol)]


def _of_protocol(bench: Bench, protocol: str) -> list[Figure]:
    with ExitStack() as stack:
        client = stack.enter_context(ShmClient(bench.urls[protocol]))
        transport = client._driver.transport
        bare = bench.plain_client(protocol)
        stack.callback(bare.close)
        batch_size = (tritonclient.grpc if protocol == "grpc" else tritonclient.http).InferInput(
            "SHM", [BATCH[0], 0], "UINT8"
        )
        batch_size.set_data_from_numpy(np.empty((BATCH[0], 0), np.uint8))
        identities = {}
        for size, byte_size in IDENTITY_BYTES.items():
            cases: dict[str, Callable[[], object]] = {
                "identity": _prepared(stack, client, "identity", (byte_size // 4,)).infer,
                "empty": lambda: bare.infer("empty", []),
                "own empty": lambda: transport.send(transport.codec.infer("empty", {}), TIMEOUT_S),
            }
            identities[size] = bench.measure(f"identity of {size}, {protocol}", cases)
        multiply: dict[str, Callable[[], object]] = {
            "bare multiply": lambda: bare.infer("bare_multiply", [batch_size]),
            "bare multiply, tmpfs": lambda: bare.infer("bare_multiply_tmpfs", [batch_size]),
            "multiply": _prepared(stack, client, "multiply", BATCH).infer,
        }
        multiply_medians = bench.measure(f"×2, {protocol}", multiply)
    figures = []
    for size, medians in identities.items():
        name = f"{protocol}: identity of {size}, in place"
        unit = "× an empty request of tritonclient's"
        figures += [
            medians.ratio(name, "identity", "empty", unit, at_most=MOST_OF_EMPTY),
            medians.ratio(name, "identity", "own empty", "× an empty request of ours", at_most=MOST_OF_OWN_EMPTY),
        ]
    doubled = multiply_medians.ratio(
        f"{protocol}: ×2 on {list(BATCH)}, in place",
        "multiply",
        "bare multiply",
        "× an empty request whose model multiplies its own memory",
        at_most=MOST_OF_EMPTY_THAT_MULTIPLIES,
    )
    doubled_in_small_pages = multiply_medians.ratio(
        doubled.name, "multiply", "bare multiply, tmpfs", "× the same, whose own memory is of tmpfs, in pages of 4 KiB"
    )
    return [*figures, doubled, doubled_in_small_pages]


def _prepared(stack: ExitStack, client: ShmClient, model: str, shape: tuple[int, ...]) -> PreparedCall:
    """Return a call whose input was filled in place."""
    call = stack.enter_context(client.prepare(model, {"INPUT0": (shape, np.float32)}))
    call.inputs["INPUT0"][:] = 1
    return call


class TimedTransport:
    """A connection that knows how long its user has waited for it."""

    def __init__(self, inner: Any) -> None:
        self.waited_s = 0.0
        self._inner = inner

    def send(self, message: Any, timeout_s: float) -> Any:
        """Send a message, as the connection does."""
        begin = time.perf_counter()
        try:
            return self._inner.send(message, timeout_s)
        finally:
            self.waited_s += time.perf_counter() - begin

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def client_time(bench: Bench) -> list[Figure]:
    """Measure the client's own time over gRPC, and what shapes that change cost."""
    tensor = np.ones(LENGTH, np.float32)
    with bench.direct_client() as client, client.prepare(MODEL, {"INPUT0": (tensor.shape, tensor.dtype)}) as call:
        transport = client._driver.transport = TimedTransport(client._driver.transport)  # type: ignore[assignment]
        rounds = ROUNDS_PER_ROUND * bench.amounts.rounds
        own_us = {
            "ShmClient.infer": _own_us(transport, lambda: client.infer(MODEL, {"INPUT0": tensor}), rounds),
            "PreparedCall.infer": _own_us(transport, call.infer, rounds),
        }
    unit = "µs beside its connection's"
    figures = [Figure(f"{name}, own time, 64 B", own, unit, "", at_most=MOST_US) for name, own in own_us.items()]
    return [*figures, _other_shapes(bench)]


def _own_us(transport: TimedTransport, call: Callable[[], object], rounds: int) -> float:
    """Return the median of what a call takes, less what it waits for its connection."""
    taken = []
    for _ in range(rounds):
        transport.waited_s = 0.0
        begin = time.perf_counter()
        call()
        taken.append(time.perf_counter() - begin - transport.waited_s)
    return statistics.median(taken) * 1e6


def _other_shapes(bench: Bench) -> Figure:
    """Measure `infer` where every request has another shape, beside the same where all have one."""
    with bench.direct_client() as client:

        def infers(arrays: list[Any]) -> Callable[[], object]:
            given = endless(arrays)

            def infer() -> float:
                x = next(given)
                with client.infer(MODEL, {"INPUT0": x}, outputs={"OUTPUT0": x.nbytes}) as result:
                    return float(result["OUTPUT0"][-1])

            return infer

        cases = {"other": infers(varying(SHAPES_BYTES)), "same": infers(repeated(SHAPES_BYTES))}
        medians = bench.measure("infer, shapes that change", cases, ROUNDS_PER_ROUND * bench.amounts.rounds)
    return medians.ratio(
        f"infer, every request another shape, around {SHAPES_BYTES >> 10} KiB, round trip",
        "other",
        "same",
        "× repeated shapes",
        at_most=OTHER_SHAPES_OVER_REPEATED,
    )


def harness(bench: Bench) -> list[Figure]:
    """Count the requests of a thread that calls the sample model ``identity``, with its session, by ``infer``."""
    del bench  # there is no server to measure against
    inputs = {"INPUT0": np.arange(4, dtype=np.float32)}
    with ModelHarness(_MODEL) as model:
        alone = max(_rate(lambda: model.infer(inputs)) for _ in range(_ROUNDS))
        with ShmClient(model, inline_bytes=0) as client:
            outputs = {"OUTPUT0": inputs["INPUT0"].nbytes}
            direct = max(
                _rate(lambda: client.infer("identity", inputs, outputs=outputs).release()) for _ in range(_ROUNDS)
            )
    basis = f"best of {_ROUNDS} times {_REQUESTS}, one thread"
    return [
        Figure("ModelHarness.infer, with a session", alone, "requests / s", basis, at_least=LEAST_REQUESTS),
        Figure("ShmClient of a harness, direct", direct, "requests / s", basis),
    ]


def _rate(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    for _ in range(_REQUESTS):
        work()
    return round(_REQUESTS / (time.perf_counter() - started))
