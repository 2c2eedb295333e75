"""Streams on the direct path: each response in the next place of a ring of frames, which the client gives back."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.client import InferenceError, PathUnavailableError, Result
from shm_backend_utils.memory.pool.options import RegionName
from shm_backend_utils.server import EmbeddedServer

from .eventually import all_memory_comes_back
from .flavours import AnyClient, Flavour, url_of
from .mapped import lies_in_shared_memory

X = np.array([1, 2, 3, 4], np.float32)
ROOM = {"Y": X.nbytes}


@pytest.fixture(params=[False, True], ids=["blocking", "aio"])
def client(request: pytest.FixtureRequest, triton_server: EmbeddedServer, region: RegionName) -> Iterator[AnyClient]:
    with Flavour(url_of(triton_server, "grpc"), request.param, region).client() as client:
        yield client


def frames_of(client: AnyClient, count: int | None = None, *, way: str = "count", **named: Any) -> Iterator[Result]:
    parameters = {"way": way} if count is None else {"way": way, "count": count}
    named = {"outputs": ROOM, "timeout_s": 10, **named}
    return client.stream("frames_of", {"X": X}, parameters=parameters, **named)


def begun_and_ended(client: AnyClient) -> list[int]:
    """Ask the model, which has one instance: it answers when the stream before has ended."""
    (result,) = frames_of(client, way="ask", outputs=["BEGUN_AND_ENDED"])
    told: list[int] = result["BEGUN_AND_ENDED"].tolist()
    return told


def length(results: Iterator[Result]) -> int:
    return sum(1 for _ in results)


def close(results: Iterator[Result]) -> None:
    results.close()  # type: ignore[attr-defined]  # it is a generator


@pytest.mark.parametrize("frames", [1, 4])
@pytest.mark.parametrize("count", [0, 1, 4, 5, 100])
def test_frames_come_in_order_through_a_ring_of_any_size(client: AnyClient, count: int, frames: int) -> None:
    values = []
    for result in frames_of(client, count, frames=frames):
        assert result.path == "direct"
        values.append(result.copy()["Y"].tolist())
        del result
    assert values == [(X + index).tolist() for index in range(count)]
    all_memory_comes_back(client)


def test_a_frame_lies_in_shared_memory_and_places_are_used_again(client: AnyClient) -> None:
    places = []
    for result in frames_of(client, 6, frames=2):
        assert lies_in_shared_memory(result["Y"])
        assert not result.overflowed
        places.append(result["Y"].ctypes.data)
        del result
    assert places == places[:2] * 3
    assert len(set(places)) == 2


def test_frames_are_never_written_over_while_an_array_of_each_is_kept(client: AnyClient) -> None:
    results = frames_of(client, frames=3)
    kept = [result["Y"] for result in itertools.islice(results, 3)]
    with pytest.raises(InferenceError, match="release results, or copy what is to be kept, or ask for more frames"):
        next(results)
    assert next(results, None) is None
    assert length(frames_of(client, 20, frames=3)) == 20  # in another slot
    assert [array.tolist() for array in kept] == [(X + index).tolist() for index in range(3)]
    assert client.stats().slots_held == 1
    kept.clear()
    all_memory_comes_back(client)


@pytest.mark.parametrize("is_closed", [True, False], ids=["closed", "forgotten"])
def test_stopping_early_ends_the_models_generator_and_gives_the_memory_back(client: AnyClient, is_closed: bool) -> None:
    begun, ended = begun_and_ended(client)
    results = frames_of(client)
    for _ in range(2):
        next(results).release()
    if is_closed:
        close(results)
    del results
    assert begun_and_ended(client) == [begun + 1, ended + 1]
    all_memory_comes_back(client)


def test_stopping_while_the_model_waits_for_a_frame_ends_its_generator(client: AnyClient) -> None:
    begun, ended = begun_and_ended(client)
    results = frames_of(client, frames=1)
    only = next(results)
    close(results)
    assert begun_and_ended(client) == [begun + 1, ended + 1]
    assert only["Y"].tolist() == X.tolist()


def test_frames_of_strings(client: AnyClient) -> None:
    results = frames_of(client, 6, way="say", outputs={"WORDS": 100}, frames=2)
    words = [result["WORDS"].tolist() for result in results]
    assert words == [[f"größer als {index}".encode(), b"x" * index] for index in range(6)]


def test_a_stream_goes_inline_when_asked_for(client: AnyClient) -> None:
    kept = list(frames_of(client, 6, path="inline", frames=1))
    assert [result.path for result in kept] == ["inline"] * 6
    assert [result["Y"].tolist() for result in kept] == [(X + index).tolist() for index in range(6)]
    assert client.stats().pool_bytes == 0


def test_triton_has_no_shared_memory_for_streams(client: AnyClient) -> None:
    with pytest.raises(PathUnavailableError, match="cannot take the path 'triton-shm'|triton-shm"):
        next(frames_of(client, 1, path="triton-shm"))


def side_by_side(client: AnyClient, value: float, **parameters: Any) -> Iterator[Result]:
    return client.stream(
        "frames_side_by_side", {"X": np.full((1, 4), value, np.float32)}, parameters=parameters, frames=1, timeout_s=20
    )


@pytest.fixture
def pair(triton_server: EmbeddedServer) -> Iterator[tuple[AnyClient, AnyClient]]:
    grpc = Flavour(url_of(triton_server, "grpc"), False)
    with grpc.client() as one, grpc.client() as other:
        yield one, other


def firsts(*streams: Iterator[Result]) -> list[Any]:
    """Begin streams together, and return the first result of each, or its error."""
    with ThreadPoolExecutor(len(streams)) as threads:
        futures = [threads.submit(next, stream) for stream in streams]
    return [future.exception() or future.result() for future in futures]


def test_streams_of_one_execute_go_on_side_by_side(pair: tuple[AnyClient, AnyClient]) -> None:
    """Were one served after the other, it would wait for its only frame, which is held until the other has one too."""
    streams = [side_by_side(client, 100.0 * index, count=10) for index, client in enumerate(pair)]
    results = firsts(*streams)
    for step in range(10):
        assert [result["Y"][0, 0] for result in results] == [step, 100 + step]
        results.clear()
        results += [next(stream, None) for stream in streams]
    assert results == [None, None]


def test_a_stream_that_fails_does_not_end_the_one_beside_it(pair: tuple[AnyClient, AnyClient]) -> None:
    good, bad = side_by_side(pair[0], 7, count=5), side_by_side(pair[1], 8, fail=True)
    first, error = firsts(good, bad)
    assert isinstance(error, InferenceError)
    assert "the model gave up on one stream" in str(error)
    assert first["Y"][0, 0] == 7
    del first
    values = []
    for result in good:
        with result:
            values.append(result["Y"][0, 0])
    assert values == [8, 9, 10, 11]
