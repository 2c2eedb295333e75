"""Streams on the direct path: each response in the next place of a ring of frames, which the client gives back."""

from __future__ import annotations

import itertools
import os
import queue
import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from shm_backend_utils.client import (
    DeadlineExceededError,
    InferenceError,
    NoSharedMemoryError,
    PathUnavailableError,
    PoolOptions,
    Result,
)
from shm_backend_utils.client.unregistering import unregister_when_free
from shm_backend_utils.errors import CallerError
from shm_backend_utils.memory.pool.options import RegionName
from shm_backend_utils.protocol.spans import MAX_FRAMES
from shm_backend_utils.server import EmbeddedServer

from .eventually import all_memory_comes_back, eventually
from .flavours import AnyClient, Flavour, url_of
from .hand_made import STEP, Claim, HandMade, hand_made
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


def by_release(result: Result) -> None:
    result.release()


def by_leaving_a_with_block(result: Result) -> None:
    with result:
        pass


def by_forgetting_it(result: Result) -> None:
    """The caller does that."""


@pytest.mark.parametrize("let_go", [by_release, by_leaving_a_with_block, by_forgetting_it])
def test_a_frame_is_given_back(client: AnyClient, let_go: Callable[[Result], None]) -> None:
    seen = 0
    for result in frames_of(client, 9, frames=1):
        let_go(result)
        seen += 1
        del result
    assert seen == 9


def test_frames_may_be_held_until_the_ring_is_full(client: AnyClient) -> None:
    results = frames_of(client, 9, frames=4)
    held = [next(results) for _ in range(4)]
    while held:
        oldest = held.pop(0)
        assert oldest["Y"][0] >= 1
        del oldest
        held += [result for result in [next(results, None)] if result is not None]
    assert next(results, None) is None


def test_an_array_holds_its_frame_when_the_result_is_released(client: AnyClient) -> None:
    results = frames_of(client, 9, frames=1)
    first = next(results)
    array = first["Y"][1:]
    first.release()
    with pytest.raises(InferenceError, match="the client holds all 1 frames of its stream"):
        next(results)
    assert array.tolist() == X[1:].tolist()


def test_frames_that_are_kept_are_never_written_over_and_the_stream_ends_by_one_clear_error(client: AnyClient) -> None:
    results = frames_of(client, frames=3)
    kept = list(itertools.islice(results, 3))
    with pytest.raises(InferenceError, match="release results, or copy what is to be kept, or ask for more frames"):
        next(results)
    assert next(results, None) is None
    assert length(frames_of(client, 20, frames=3)) == 20  # in another slot
    assert [result["Y"].tolist() for result in kept] == [(X + index).tolist() for index in range(3)]
    assert client.stats().slots_held == 1
    kept.clear()
    all_memory_comes_back(client)


def test_copies_hold_no_frame(client: AnyClient) -> None:
    copies = [result.copy()["Y"] for result in frames_of(client, 50, frames=2)]
    assert [copy[0] for copy in copies] == [1 + index for index in range(50)]
    assert not any(lies_in_shared_memory(copy) for copy in copies)


def test_frames_stay_valid_when_the_client_is_closed(triton_server: EmbeddedServer) -> None:
    with Flavour(url_of(triton_server, "grpc"), False).client() as client:
        kept = list(frames_of(client, 3))
    assert [result["Y"].tolist() for result in kept] == [(X + index).tolist() for index in range(3)]


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


def test_a_response_that_does_not_come_in_time_ends_the_stream(client: AnyClient) -> None:
    results = frames_of(client, 1, way="stall", timeout_s=0.3)
    next(results).release()
    with pytest.raises(DeadlineExceededError):
        next(results)
    assert next(results, None) is None
    begun_and_ended(client)
    all_memory_comes_back(client)


def test_an_error_comes_after_the_frames_before_it(client: AnyClient) -> None:
    results = frames_of(client, 2, way="fail")
    assert [result["Y"][0] for result in itertools.islice(results, 2)] == [1, 2]
    with pytest.raises(InferenceError, match="RuntimeError: the model gave up half way"):
        next(results)
    assert next(results, None) is None
    assert length(frames_of(client, 3)) == 3
    all_memory_comes_back(client)


@pytest.mark.parametrize("is_aio", [False, True], ids=["blocking", "aio"])
def test_a_frame_that_does_not_fit_comes_in_band_and_the_next_stream_has_more_room(
    triton_server: EmbeddedServer, is_aio: bool
) -> None:
    with Flavour(url_of(triton_server, "grpc"), is_aio).client(pool=PoolOptions(stream_guess_bytes=0)) as client:
        grow_twice(client)


def grow_twice(client: AnyClient) -> None:
    for is_known in (False, True):
        lengths, overflows = [], []
        for index, result in enumerate(frames_of(client, 3, way="grow", outputs=["Y"])):
            assert result["Y"].tolist() == (index + 1) * (X + index).tolist()
            lengths.append(len(result["Y"]))
            overflows.append("Y" in result.overflowed)
            del result
        assert lengths == [4, 8, 12]
        assert overflows[0] is not is_known
        assert not is_known or not any(overflows)


def test_a_first_stream_has_room_for_frames_whose_size_nobody_knows_yet(client: AnyClient) -> None:
    results = list(frames_of(client, 3, way="grow", outputs=["Y"]))
    assert [(len(result["Y"]), dict(result.overflowed)) for result in results] == [(4, {}), (8, {}), (12, {})]


def test_only_frames_that_do_not_fit_come_in_band(client: AnyClient) -> None:
    results = frames_of(client, 3, way="grow", outputs={"Y": 2 * X.nbytes})
    assert ["Y" in result.overflowed for result in results] == [False, False, True]


def test_a_decoupled_model_may_answer_never(client: AnyClient) -> None:
    assert list(frames_of(client, way="nothing")) == []
    all_memory_comes_back(client)


def test_a_decoupled_model_may_answer_once(client: AnyClient) -> None:
    (result,) = frames_of(client, way="ask", outputs=None)
    assert list(result) == ["BEGUN_AND_ENDED"]
    assert result.path == "direct"


def test_frames_of_strings(client: AnyClient) -> None:
    results = frames_of(client, 6, way="say", outputs={"WORDS": 100}, frames=2)
    words = [result["WORDS"].tolist() for result in results]
    assert words == [[f"größer als {index}".encode(), b"x" * index] for index in range(6)]


def test_a_stream_goes_inline_when_asked_for(client: AnyClient) -> None:
    kept = list(frames_of(client, 6, path="inline", frames=1))
    assert [result.path for result in kept] == ["inline"] * 6
    assert [result["Y"].tolist() for result in kept] == [(X + index).tolist() for index in range(6)]
    assert client.stats().pool_bytes == 0


def test_stopping_early_ends_the_generator_of_an_inline_stream_too(client: AnyClient) -> None:
    begun, ended = begun_and_ended(client)
    results = frames_of(client, path="inline")
    next(results)
    close(results)
    assert begun_and_ended(client) == [begun + 1, ended + 1]


def test_triton_has_no_shared_memory_for_streams(client: AnyClient) -> None:
    with pytest.raises(PathUnavailableError, match="cannot take the path 'triton-shm'|triton-shm"):
        next(frames_of(client, 1, path="triton-shm"))


@pytest.mark.parametrize("is_aio", [False, True], ids=["blocking", "aio"])
def test_http_has_no_streams(triton_server: EmbeddedServer, is_aio: bool) -> None:
    with (
        Flavour(url_of(triton_server, "http"), is_aio).client() as client,
        pytest.raises(CallerError, match="is HTTP, which has no streams"),
    ):
        next(frames_of(client, 1))


@pytest.mark.parametrize("frames", [0, -1, MAX_FRAMES + 1])
def test_a_ring_that_is_no_ring_is_refused(client: AnyClient, frames: int) -> None:
    with pytest.raises(CallerError, match=f"frames is {frames}; expected a whole number, 1 to {MAX_FRAMES}"):
        next(frames_of(client, 1, frames=frames))


@pytest.mark.parametrize("region", ["system"])
def test_a_ring_that_shared_memory_is_too_small_for_is_not_needed(
    client: AnyClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [result.path for result in frames_of(client, 3)] == ["direct"] * 3
    space = SimpleNamespace(f_bavail=0, f_blocks=1, f_frsize=4096)
    with monkeypatch.context() as patch:
        patch.setattr(os, "statvfs", lambda _: space)
        assert [result.path for result in frames_of(client, 3, frames=9)] == ["inline"] * 3
        with pytest.raises(NoSharedMemoryError, match="/dev/shm has 0 free of 4096"):
            next(frames_of(client, 3, frames=9, path="direct"))
    assert [result.path for result in frames_of(client, 3, frames=9)] == ["direct"] * 3


def test_who_holds_all_frames_for_longer_than_he_waits_is_told_so(client: AnyClient) -> None:
    kept: list[Result] = []
    with pytest.raises(DeadlineExceededError, match="this client holds as many results of the stream as there are"):
        kept.extend(frames_of(client, 5, frames=2, timeout_s=0.2))
    assert len(kept) == 2


def test_the_largest_ring(client: AnyClient) -> None:
    kept = list(frames_of(client, MAX_FRAMES, frames=MAX_FRAMES))
    assert [result["Y"][0] for result in kept] == [1 + index for index in range(MAX_FRAMES)]


def test_a_ring_is_used_again_by_the_next_stream(client: AnyClient) -> None:
    places = set()
    for _ in range(3):
        for result in frames_of(client, 3, frames=2):
            assert result["Y"][0] <= 3
            places.add(result["Y"].ctypes.data)
            del result
        all_memory_comes_back(client)
    assert len(places) == 2
    assert client.stats().slots_idle == 1


def side_by_side(client: AnyClient, value: float, **parameters: Any) -> Iterator[Result]:
    return client.stream(
        "frames_side_by_side",
        {"X": np.full((1, 4), value, np.float32)},
        parameters=parameters,
        frames=1,
        timeout_s=20,
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


@pytest.fixture
def by_hand(triton_server: EmbeddedServer) -> Iterator[HandMade]:
    """A valid request with a ring of four frames."""
    with hand_made(triton_server.grpc_url, "frames_of", {"X": X}, ROOM, slot_count=5) as request:
        request.table.frame_count, request.table.frame_slot, request.table.frame_stride = 4, 1, STEP
        yield request


def last_error(request: HandMade) -> str:
    """Send it, and return its error; empty if its stream ends well."""
    answers: queue.Queue[tuple[Any, InferenceServerException | None]] = queue.Queue()
    request.stream(lambda result, error: answers.put((result, error)))
    while True:
        result, error = answers.get(timeout=20)
        if error is not None:
            return str(error.message())
        if result.get_response().parameters["triton_final_response"].bool_param:
            return ""


def test_a_ring_made_by_hand_works_as_long_as_nothing_breaks_it(by_hand: HandMade) -> None:
    by_hand.parameters.update(count=3)
    assert last_error(by_hand) == ""
    begin, byte_size = by_hand.table["Y"].offset, by_hand.table["Y"].byte_size
    frames = [by_hand.array(begin + place * STEP, byte_size, np.float32).tolist() for place in range(3)]
    assert frames == [(X + index).tolist() for index in range(3)]
    assert [by_hand.region.record(slot).completed for slot in range(1, 5)] == [(5 << 32) + n for n in (1, 2, 3)] + [0]
    assert by_hand.region.record(0).completed == 5


@pytest.mark.parametrize(
    ("ring", "field"),
    [
        ({"frame_slot": 2}, "frame_slot"),
        ({"frame_slot": 1000}, "frame_slot"),
        ({"frame_slot": 1021}, "frame_slot"),
        ({"frame_slot": 0}, "frame_slot"),
        ({"frame_slot": -1}, "frame_slot"),
        ({"frame_count": 5}, "frame_slot"),
        ({"frame_count": MAX_FRAMES + 1}, "frame_count"),
        ({"frame_count": -1}, "frame_count"),
        ({"frame_stride": 1 << 40}, "frame_stride"),
        ({"frame_stride": (1 << 63) - 1}, "frame_stride"),
        ({"frame_stride": -4096}, "frame_stride"),
        ({"frame_stride": 8 * 4096}, "frame_stride"),
        ({"frame_stride": STEP + 1}, "frame_stride"),
        ({"frame_stride": 0}, "frame_stride"),
        ({"frame_stride": X.nbytes - 1}, "frame_stride"),
    ],
    ids=str,
)
def test_a_hostile_ring_is_refused_and_its_field_named(by_hand: HandMade, ring: dict[str, Any], field: str) -> None:
    for name, value in ring.items():
        setattr(by_hand.table, name, value)
    by_hand.parameters.update(count=3)
    before = by_hand.content()
    assert last_error(by_hand).startswith(f"shm:table: {field}")
    assert by_hand.content() == before


def test_a_ring_over_an_input_is_refused(by_hand: HandMade) -> None:
    x, y = by_hand.table["X"], by_hand.table["Y"]
    x.offset, y.offset = y.offset + 2 * STEP, x.offset
    assert "shm:table: outputs.Y" in last_error(by_hand)


def test_a_ring_that_leaves_a_registered_region_is_refused(by_hand: HandMade) -> None:
    """How large it is the model alone knows; behind what is registered, the object goes on."""
    path = Path("/dev/shm") / f"foreign-{os.getpid()}-{secrets.token_hex(4)}"
    path.write_bytes(bytes(8 * STEP))
    client = by_hand.client(by_hand.url)
    client.register_system_shared_memory(path.name, path.name, 3 * STEP)
    try:
        by_hand.table.regions = [Claim(3, path.name.encode())]
        by_hand.table["Y"].region, by_hand.table["Y"].offset = 1, 0
        by_hand.parameters.update(count=4)
        assert last_error(by_hand).startswith("shm:table: outputs.Y: found 12304 bytes at offset 0")
        assert not any(path.read_bytes())
        client.stop_stream()
        by_hand.table.frame_count = 3
        by_hand.parameters.update(count=3)
        by_hand.next()
        assert last_error(by_hand) == ""
        frames = [np.frombuffer(path.read_bytes(), np.float32, 4, place * STEP).tolist() for place in range(3)]
        assert frames == [(X + index).tolist() for index in range(3)]
    finally:
        unregister_when_free(lambda: client.unregister_system_shared_memory(path.name))
        path.unlink()


def test_a_client_that_gives_no_frame_back_is_not_waited_for_for_ever(by_hand: HandMade) -> None:
    assert "the client holds all 4 frames" in last_error(by_hand)
    assert by_hand.region.record(0).completed == 5
    eventually(lambda: by_hand.region.lease(0).take())


def test_a_client_that_gives_back_what_it_has_not_got_breaks_its_own_frames_alone(
    by_hand: HandMade, client: AnyClient
) -> None:
    for slot in range(1, 5):
        by_hand.region.record(slot).generation = (1 << 63) - 1
    by_hand.parameters.update(count=20)
    assert last_error(by_hand) == ""
    assert length(frames_of(client, 3)) == 3


def test_an_exception_thrown_into_a_stream_ends_it(client: AnyClient) -> None:
    results = frames_of(client)
    next(results)
    with pytest.raises(KeyError):
        results.throw(KeyError("the caller failed"))  # type: ignore[attr-defined]  # it is a generator
    begun_and_ended(client)
    all_memory_comes_back(client)
