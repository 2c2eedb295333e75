"""Decoupled models: any number of responses to one request."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.client import DeadlineExceededError, InferenceError, Result, ServerUnavailableError
from shm_backend_utils.errors import CallerError, TensorError
from shm_backend_utils.server import EmbeddedServer

from .eventually import all_memory_comes_back
from .flavours import AnyClient, Flavour, url_of
from .wiretap import tapped

X = np.array([1, 2, 3], np.float32)


@pytest.fixture(params=[False, True], ids=["blocking", "aio"])
def over_grpc(request: pytest.FixtureRequest, triton_server: EmbeddedServer) -> Flavour:
    """Each of the two clients that have streams."""
    return Flavour(url_of(triton_server, "grpc"), request.param)


@pytest.fixture
def client(over_grpc: Flavour) -> Iterator[AnyClient]:
    with over_grpc.client() as client:
        yield client


def countdown(client: AnyClient, **parameters: Any) -> Iterator[Result]:
    return client.stream("countdown", {"X": X}, parameters=parameters, timeout_s=10)


@pytest.mark.parametrize("count", [0, 1, 2, 100])
def test_responses_come_in_order(client: AnyClient, count: int) -> None:
    values = [result["Y"].tolist() for result in countdown(client, count=count)]
    assert values == [[1 + i, 2 + i, 3 + i] for i in range(count)]


def test_responses_come_one_by_one_and_stay_valid(client: AnyClient) -> None:
    results = countdown(client)
    first, second = next(results), next(results)
    assert first.path == "inline"
    assert (second["Y"] - first["Y"]).tolist() == [1, 1, 1]
    close(results)


def close(results: Iterator[Result]) -> None:
    results.close()  # type: ignore[attr-defined]  # it is a generator


def test_stopping_early_ends_the_request(client: AnyClient) -> None:
    results = countdown(client)
    next(results)
    close(results)
    # The model has one instance, which would otherwise go on for ever.
    assert len(list(countdown(client, count=3))) == 3


def test_letting_go_of_a_stream_ends_the_request(client: AnyClient) -> None:
    for result in countdown(client):
        assert (result["Y"] == X).all()
        break
    assert len(list(countdown(client, count=3))) == 3


def test_an_error_comes_after_the_responses_before_it(client: AnyClient) -> None:
    results = countdown(client, count=10, fails_at=2)
    assert [result["Y"][0] for result in itertools.islice(results, 2)] == [1, 2]
    with pytest.raises(InferenceError, match="the model gave up half way"):
        next(results)
    with pytest.raises(StopIteration):
        next(results)
    assert len(list(countdown(client, count=3))) == 3


def test_a_response_that_does_not_come_is_an_error(client: AnyClient) -> None:
    results = client.stream("countdown", {"X": X}, parameters={"count": 9, "stalls_at": 1}, timeout_s=0.5)
    assert next(results)["Y"][0] == 1
    with pytest.raises(DeadlineExceededError):
        next(results)
    assert len(list(countdown(client, count=3))) == 3


def test_a_connection_that_breaks_is_an_error(over_grpc: Flavour) -> None:
    with tapped(over_grpc.url) as wiretap, replace(over_grpc, url=wiretap.address).client() as client:
        results = countdown(client)
        next(results)
        wiretap.close()
        with pytest.raises(ServerUnavailableError):
            list(results)


def test_what_cannot_be_sent_is_an_error(client: AnyClient) -> None:
    with pytest.raises(CallerError, match="reserved"):
        list(countdown(client, priority=1))


def test_a_model_that_is_not_decoupled_streams_one_response(client: AnyClient) -> None:
    (result,) = client.stream("identity", {"INPUT0": X})
    assert result["OUTPUT0"].tolist() == X.tolist()


def test_only_the_named_outputs_are_streamed(client: AnyClient) -> None:
    (result,) = client.stream("repeat", {"X": X}, outputs=["Y"], parameters={"times": 2})
    assert list(result) == ["Y"]


def test_two_streams_do_not_mix(client: AnyClient) -> None:
    pairs = zip(client.stream("identity", {"INPUT0": X}), client.stream("identity", {"INPUT0": X + 1}), strict=True)
    assert [(a["OUTPUT0"][0], b["OUTPUT0"][0]) for a, b in pairs] == [(1, 2)]


def test_wrong_inputs_are_an_error_before_anything_is_sent(client: AnyClient) -> None:
    with pytest.raises(TensorError, match="model 'countdown' has no input 'Z'"):
        list(client.stream("countdown", {"Z": X}))


def test_a_stream_counts_as_one_request(client: AnyClient) -> None:
    list(countdown(client, count=5))
    assert client.stats().requests == 1
    with pytest.raises(InferenceError):
        list(countdown(client, count=5, fails_at=1))
    assert (client.stats().requests, client.stats().failures) == (2, 1)


@pytest.mark.parametrize("is_aio", [False, True], ids=["blocking", "aio"])
def test_http_has_no_streams_and_says_what_has(triton_server: EmbeddedServer, is_aio: bool) -> None:
    with (
        Flavour(url_of(triton_server, "http"), is_aio).client() as client,
        pytest.raises(CallerError, match="is HTTP, which has no streams; use a gRPC URL for decoupled models"),
    ):
        list(countdown(client, count=1))


def test_infer_of_a_decoupled_model_is_an_error_that_says_so(any_client: AnyClient) -> None:
    with pytest.raises((CallerError, InferenceError), match="decoupled"):
        any_client.infer("countdown", {"X": X}, parameters={"count": 1})
    all_memory_comes_back(any_client)
