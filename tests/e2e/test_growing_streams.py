"""A stream whose frames find too little room gets more: later frames lie in another region of the client's."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.client import CopyWarning, DeadlineExceededError, PoolOptions, Result
from shm_backend_utils.server import EmbeddedServer

from .eventually import all_memory_comes_back
from .flavours import AnyClient, Flavour, url_of
from .mapped import lies_in_shared_memory


@pytest.fixture(params=[False, True], ids=["blocking", "aio"])
def client(request: pytest.FixtureRequest, triton_server: EmbeddedServer) -> Iterator[AnyClient]:
    """It has no room for outputs whose size nobody knows yet."""
    grpc = Flavour(url_of(triton_server, "grpc"), request.param)
    with grpc.client(pool=PoolOptions(stream_guess_bytes=0)) as client:
        yield client


def sized(client: AnyClient, lengths: Sequence[int], *, stalls: bool = False, **named: Any) -> Iterator[Result]:
    parameters = {"way": "sized", "lengths": " ".join(map(str, lengths)), "stalls": stalls}
    named = {"outputs": ["Y"], "timeout_s": 10, **named}
    return client.stream("frames_of", {"X": np.ones(4, np.float32)}, parameters=parameters, **named)


def is_whole(result: Result, index: int, length: int) -> bool:
    y = result["Y"]
    return y.shape == (length,) and bool((y == index).all())


def overflows(results: Iterator[Result], lengths: Sequence[int]) -> list[int]:
    """Return which responses came back through Triton. The others lie in shared memory; all are what they should be."""
    found = []
    come = 0
    for result in results:
        with result:
            assert result.path == "direct"
            assert is_whole(result, come, lengths[come])
            assert lies_in_shared_memory(result["Y"]) is not bool(result.overflowed) or not lengths[come]
            if result.overflowed:
                found.append(come)
        come += 1
    assert come == len(lengths)
    return found


def test_every_frame_behind_one_that_did_not_fit_is_direct(client: AnyClient) -> None:
    lengths = [1000] * 6
    assert overflows(sized(client, lengths, frames=1), lengths) == [0]
    assert overflows(sized(client, lengths, frames=1), lengths) == []  # what was learned is for the next stream, too
    all_memory_comes_back(client)


@pytest.mark.parametrize("frames", [2, 3, 64])
def test_in_rings_of_any_size_frames_that_grow_are_what_the_model_wrote(client: AnyClient, frames: int) -> None:
    lengths = [length for length in (10, 1000, 5000, 100_000) for _ in range(3 * frames)]
    found = overflows(sized(client, lengths, frames=frames), lengths)
    steps = [index // (3 * frames) for index in found]
    assert steps[0] == 0
    assert all(index % (3 * frames) < 2 * frames for index in found)
    all_memory_comes_back(client)


def test_strings_get_more_room_too(client: AnyClient) -> None:
    found: list[bool] = []
    parameters = {"way": "say", "count": 8}
    for result in client.stream("frames_of", {}, outputs=["WORDS"], parameters=parameters, frames=1, timeout_s=10):
        with result:
            index = len(found)
            assert result["WORDS"].tolist() == [f"größer als {index}".encode(), b"x" * index]
            found.append(bool(result.overflowed))
    assert found[:2] == [True, False]
    assert found.count(True) < 5
    all_memory_comes_back(client)


def test_a_response_that_does_not_come_in_time_leaves_no_memory_in_doubt_for_ever(client: AnyClient) -> None:
    results = sized(client, [1000] * 2, frames=1, stalls=True, timeout_s=0.5)
    assert overflows_of(results, 2) == [True, False]
    with pytest.raises(DeadlineExceededError):
        next(results)
    all_memory_comes_back(client)


def overflows_of(results: Iterator[Result], count: int) -> list[bool]:
    found = []
    for _ in range(count):
        with next(results) as result:
            found.append(bool(result.overflowed))
    return found


def told(results: Iterator[Result]) -> tuple[list[bool], list[str]]:
    """Return which responses overflowed, and what the user was told."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = []
        for result in results:
            found.append(bool(result.overflowed))
            del result
    return found, [str(each.message) for each in caught if each.category is CopyWarning]


def test_who_has_no_memory_left_gets_frames_through_triton_and_is_told(triton_server: EmbeddedServer) -> None:
    options = PoolOptions(max_bytes=2**16, stream_guess_bytes=0)
    with Flavour(url_of(triton_server, "grpc"), False).client(pool=options) as client:
        found, messages = told(sized(client, [20_000] * 5, frames=1))
        assert found == [True] * 5
        (message,) = messages
        assert "the client's memory has no room for more, see PoolOptions(max_bytes=...); say it beforehand" in message
        all_memory_comes_back(client)
