"""A stream whose frames find too little room: they come through Triton, and the next stream has room for them."""

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


def test_frames_that_find_no_room_are_right_and_the_next_stream_has_room(client: AnyClient) -> None:
    lengths = [10, 1000, 5000]
    assert overflows(sized(client, lengths, frames=2), lengths) == [0, 1, 2]
    assert overflows(sized(client, lengths, frames=2), lengths) == []
    all_memory_comes_back(client)


def test_strings_have_room_in_the_next_stream_too(client: AnyClient) -> None:
    parameters = {"way": "say", "count": 8}
    for is_first in (True, False):
        results = client.stream("frames_of", {}, outputs=["WORDS"], parameters=parameters, frames=1, timeout_s=10)
        for index, result in enumerate(results):
            with result:
                assert result["WORDS"].tolist() == [f"größer als {index}".encode(), b"x" * index]
                assert bool(result.overflowed) is is_first
            del result
    all_memory_comes_back(client)


def test_a_response_that_does_not_come_in_time_leaves_no_memory_in_doubt_for_ever(client: AnyClient) -> None:
    results = sized(client, [1000] * 2, frames=1, stalls=True, timeout_s=0.5)
    assert overflows_of(results, 2) == [True, True]
    with pytest.raises(DeadlineExceededError):
        next(results)
    all_memory_comes_back(client)


def overflows_of(results: Iterator[Result], count: int) -> list[bool]:
    found = []
    for _ in range(count):
        with next(results) as result:
            found.append(bool(result.overflowed))
    return found


def test_frames_that_come_through_triton_are_told_once(client: AnyClient) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for result in sized(client, [20_000] * 5, frames=1):
            del result
    (message,) = [str(each.message) for each in caught if each.category is CopyWarning]
    assert "later streams have room for as much; say it beforehand" in message
