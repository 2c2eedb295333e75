"""Every public way to call a model, from eight threads that give way to each other at nearly every step.

Each answer is checked against what was sent. ``--calls`` says how many calls all of these tests make together.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest

from shm_backend_utils.client import PoolOptions, ShmClient
from shm_backend_utils.compat.triton_shm_client import TritonSHMClient
from shm_backend_utils.server import EmbeddedServer

from .eventually import all_memory_comes_back
from .flavours import FLAVOURS, AnyClient, AwaitedClient, client_of, url_of
from .two_classes import ROWS

THREADS: Final = 8
TIMEOUT_S: Final = 60
SCARCE: Final = PoolOptions(max_bytes=1 << 21)  # so that threads wait for each other's memory
PATHS: Final = ("auto", "direct", "triton-shm", "inline")

Random = np.random.Generator
Way = Callable[[AnyClient, Random], Iterator[bool]]


@dataclass
class Count:
    """What came of the calls of a thread."""

    right: int = 0
    wrong: int = 0
    errors: list[str] = field(default_factory=list)


pytestmark = pytest.mark.usefixtures("switching_often")


def numbers(random: Random) -> npt.NDArray[np.float32]:
    """Return an array of a size of its own, with contents of its own."""
    return random.random(int(random.integers(1, 3000)), dtype=np.float32)


def rows(random: Random, most: int) -> npt.NDArray[np.float32]:
    return random.random((int(random.integers(1, most + 1)), 4), dtype=np.float32)


def any_path(random: Random) -> Any:
    return PATHS[random.integers(len(PATHS))]


def repeated(random: Random) -> tuple[npt.NDArray[np.float32], dict[str, Any]]:
    """Return an input of model `repeat`, and what else a call of it says."""
    return numbers(random), {
        "outputs": ["Y"],
        "path": any_path(random),
        "parameters": {"times": random.integers(1, 4).item()},
    }


def is_repeated(y: npt.NDArray[Any], x: npt.NDArray[Any], named: dict[str, Any]) -> bool:
    return np.array_equal(y, np.tile(x, named["parameters"]["times"]))


def framed(random: Random) -> tuple[npt.NDArray[np.float32], dict[str, Any]]:
    """Return an input of model `frames_of`, and what else a stream of it says."""
    x = numbers(random)
    hint = [None, {"Y": x.nbytes}][random.integers(2)]
    frames, count = random.integers(1, 4).item(), random.integers(0, 6).item()
    return x, {"outputs": hint or ["Y"], "frames": frames, "parameters": {"count": count}}


# Each way yields, for every call that it makes, whether the answer was right.


def infer(client: AnyClient, random: Random) -> Iterator[bool]:
    x, named = repeated(random)
    yield is_repeated(client.infer("repeat", {"X": x}, **named)["Y"], x, named)


def infer_rows(client: AnyClient, random: Random) -> Iterator[bool]:
    x = rows(random, 12)
    result = client.infer("rows", {"X": x}, outputs=["DOUBLED"], split=len(x) > 4, path=any_path(random))
    yield np.array_equal(result["DOUBLED"], x * 2)


def submit(client: AnyClient, random: Random) -> Iterator[bool]:
    futures = []
    for _ in range(3):
        x, named = repeated(random)
        given = x.copy()
        futures.append((client.submit("repeat", {"X": given}, **named), x, named))
        if isinstance(client, ShmClient):  # a task reads its inputs when it begins
            given.fill(-1)
    if random.integers(4) == 0:
        futures[0][0].cancel()
    for future, x, named in futures:
        if not future.cancelled():
            yield is_repeated(future.result(TIMEOUT_S)["Y"], x, named)


def prepare(client: AnyClient, random: Random) -> Iterator[bool]:
    x, named = repeated(random)
    with client.prepare("repeat", {"X": (x.shape, x.dtype)}, **named) as call:
        for factor in (1, 2):
            np.multiply(x, factor, out=call.inputs["X"])
            yield is_repeated(call.infer()["Y"], x * factor, named)


def stream(client: AnyClient, random: Random) -> Iterator[bool]:
    x, named = framed(random)
    right, count = True, 0
    for result in client.stream("frames_of", {"X": x}, **named):
        right &= np.array_equal(result["Y"], x + np.float32(count))
        count += 1
        del result
    yield right and count == named["parameters"]["count"]


# Who makes them, so many times in each thread.

ON_BOTH: Final = (infer, infer_rows, submit, prepare)
TURN: Final[dict[str, tuple[Way, ...]]] = {"grpc": (*ON_BOTH, stream), "http": ON_BOTH}
TEST_COUNT: Final = len(FLAVOURS) + 1


def called(client: Any, ways: tuple[Callable[[Any, Random], Iterator[bool]], ...], share: int, seed: int) -> Count:
    """Call in these ways in turn, until a share of the calls is made."""
    count, random = Count(), np.random.default_rng(seed)
    for way in itertools.cycle(ways):
        try:
            for is_right in way(client, random):
                count.right += is_right
                count.wrong += not is_right
        except Exception as error:
            count.errors.append(f"{way.__name__}: {error!r}")
        if count.right + count.wrong + len(count.errors) >= share:
            return count
    raise AssertionError("no way")


def infer_registered(client: TritonSHMClient, random: Random) -> Iterator[bool]:
    x = rows(random, 12)
    yield np.array_equal(client.infer_shm("rows", {"X": x})["DOUBLED"], x * 2)


@contextlib.contextmanager
def registered(server: EmbeddedServer) -> Iterator[TritonSHMClient]:
    with TritonSHMClient(server.grpc_url) as client:
        ROWS.but(pool_size=THREADS // 2).register(client)
        yield client


def all_are_right(work: list[Callable[[int], Count]], share: int) -> None:
    """Have a thread do each of these, all at once."""
    with concurrent.futures.ThreadPoolExecutor(len(work)) as threads:
        counts = [future.result() for future in [threads.submit(each, seed) for seed, each in enumerate(work)]]
    errors = [error for count in counts for error in count.errors]
    assert (sum(count.wrong for count in counts), errors[:5], len(errors)) == (0, [], 0)
    assert sum(count.right for count in counts) >= share * len(work)


@pytest.fixture
def share(request: pytest.FixtureRequest) -> int:
    return -(-int(request.config.getoption("--calls")) // (TEST_COUNT * THREADS))


@pytest.mark.every_flavour
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_threads_and_tasks_that_share_a_client_get_their_own_answers(
    triton_server: EmbeddedServer, flavour: str, share: int
) -> None:
    ways = TURN[flavour.partition(" ")[0]]
    turns = [ways[first % len(ways) :] + ways[: first % len(ways)] for first in range(THREADS)]
    with client_of(flavour, url_of(triton_server, flavour), timeout_s=TIMEOUT_S, pool=SCARCE) as client:
        all_are_right([lambda seed, turn=turn: called(client, turn, share, seed) for turn in turns], share)  # type: ignore[misc]
        all_memory_comes_back(client)
        assert isinstance(client, AwaitedClient) or client.stats().failures == 0  # a task that is cancelled is one


def test_clients_of_every_kind_at_once_get_their_own_answers(triton_server: EmbeddedServer, share: int) -> None:
    grpc, http = url_of(triton_server, "grpc"), url_of(triton_server, "http")
    with (
        ShmClient(grpc, timeout_s=TIMEOUT_S) as first,
        ShmClient(http, timeout_s=TIMEOUT_S) as second,
        AwaitedClient(grpc, timeout_s=TIMEOUT_S) as third,
        registered(triton_server) as fourth,
    ):
        work: list[Callable[[int], Count]] = [
            lambda seed: called(first, TURN["grpc"], share, seed),
            lambda seed: called(second, TURN["http"], share, seed),
            lambda seed: called(third, TURN["grpc"], share, seed),
            lambda seed: called(fourth, (infer_registered,), share, seed),
        ]
        all_are_right(work * (THREADS // len(work)), share)
        for client in (first, second, third):
            all_memory_comes_back(client)
