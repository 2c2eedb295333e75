"""What a call says beside its tensors reaches the server, and the model where Triton lets it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.client import InferenceError, Result
from shm_backend_utils.client.options import PathName
from shm_backend_utils.errors import CallerError
from tests.releases import takes_floats

from .flavours import AnyClient, Flavour
from .wiretap import Wiretap, tapped

X = np.ones(3, np.float32)


def facts(client: AnyClient, **named: Any) -> dict[str, Any]:
    """Return what the model was told."""
    with client.infer("request_facts", {"X": X}, **named) as result:
        told: dict[str, Any] = json.loads(result["FACTS"].tobytes())
        return told


@pytest.fixture
def wiretap(flavour: Flavour) -> Iterator[Wiretap]:
    with tapped(flavour.url.removeprefix("http://")) as wiretap:
        yield wiretap


@pytest.fixture
def tapped_client(flavour: Flavour, wiretap: Wiretap) -> Iterator[AnyClient]:
    url = wiretap.address if flavour.has_streams else f"http://{wiretap.address}"
    with replace(flavour, url=url).client() as client:
        yield client


@pytest.mark.parametrize("version", ["1", "2"])
def test_a_version_of_the_model(any_client: AnyClient, path: PathName, version: str) -> None:
    assert facts(any_client, model_version=version, path=path)["version"] == version


def test_by_default_the_server_chooses_the_version(any_client: AnyClient, path: PathName) -> None:
    assert facts(any_client, path=path)["version"] == "2"


def test_a_version_that_the_server_does_not_have(any_client: AnyClient, path: PathName) -> None:
    with pytest.raises(InferenceError, match="request_facts"):
        facts(any_client, model_version="3", path=path)


def test_a_request_id_reaches_the_model_and_comes_back(any_client: AnyClient, path: PathName) -> None:
    with any_client.infer("request_facts", {"X": X}, request_id="order 66", path=path) as result:
        assert json.loads(result["FACTS"].tobytes())["request_id"] == "order 66"
        assert id_of(result) == "order 66"


def id_of(result: Result) -> str:
    response = result.response.get_response()
    found: str = response["id"] if isinstance(response, dict) else response.id
    return found


@takes_floats
def test_parameters_reach_the_model_and_nothing_of_the_protocol_with_them(
    any_client: AnyClient, path: PathName
) -> None:
    parameters = {"text": "größer", "count": 3, "share": 0.25, "flag": True}
    assert facts(any_client, parameters=parameters, path=path)["parameters"] == parameters


def test_a_prepared_call_keeps_its_options(any_client: AnyClient, path: PathName) -> None:
    with any_client.prepare(
        "request_facts", {"X": ((3,), np.float32)}, request_id="seven", parameters={"a": 1}, path=path
    ) as call:
        for _ in range(2):
            with call.infer() as result:
                told = json.loads(result["FACTS"].tobytes())
                assert told["request_id"] == "seven"
                assert told["parameters"] == {"a": 1}


@pytest.mark.parametrize("name", ["shm_io", "shm_slot", "shm_generation"])
def test_parameters_of_the_protocol_are_the_clients_own(any_client: AnyClient, name: str) -> None:
    with pytest.raises(CallerError, match=f"parameter '{name}' is written by the client itself"):
        facts(any_client, parameters={name: 1})


def test_a_time_limit_for_the_queue_reaches_the_server(any_client: AnyClient, path: PathName) -> None:
    assert facts(any_client, timeout=5_000_000, path=path)["timeout"] == 5_000_000


def test_a_priority_is_sent(tapped_client: AnyClient, wiretap: Wiretap, path: PathName) -> None:
    facts(tapped_client, priority=1, path=path)
    assert b"priority" in wiretap.sent


def test_headers_are_sent(tapped_client: AnyClient, wiretap: Wiretap, path: PathName) -> None:
    headers = {"x-tenant": "acme-and-sons"}
    facts(tapped_client, headers=headers, path=path)
    assert b"x-tenant" in wiretap.sent
    assert b"acme-and-sons" in wiretap.sent
    assert headers == {"x-tenant": "acme-and-sons"}


@pytest.mark.parametrize("compression", ["gzip", "deflate"])
def test_compression_does_not_change_the_result(any_client: AnyClient, path: PathName, compression: str) -> None:
    x = np.arange(50_000, dtype=np.float32)
    with any_client.infer("identity", {"INPUT0": x}, compression=compression, path=path) as result:
        np.testing.assert_array_equal(result["OUTPUT0"], x)


@pytest.mark.parametrize("compression", ["gzip", "deflate"])
def test_compression_makes_what_is_sent_smaller(tapped_client: AnyClient, wiretap: Wiretap, compression: str) -> None:
    x = np.zeros(50_000, np.float32)
    tapped_client.infer("identity", {"INPUT0": x}, compression=compression, path="inline").release()
    assert len(wiretap.sent) < x.nbytes / 10


def test_an_unknown_compression(any_client: AnyClient) -> None:
    with pytest.raises(CallerError, match="compression is 'zip'; expected 'gzip' or 'deflate'"):
        facts(any_client, compression="zip")


def test_an_unknown_option(any_client: AnyClient) -> None:
    with pytest.raises(TypeError, match="there is no keyword argument 'prio'"):
        facts(any_client, prio=1)


def test_sequences_are_kept_apart(any_client: AnyClient, path: PathName) -> None:
    sums = []
    first, second = np.random.default_rng().integers(1, 2**60, 2).tolist()  # ids are the server's, not the client's
    for sequence, value, start, end in (
        (first, 1, True, False),
        (second, 10, True, False),
        (first, 2, False, False),
        (second, 20, False, True),
        (first, 3, False, True),
    ):
        with any_client.infer(
            "running_sum",
            {"X": np.array([value], np.float32)},
            sequence_id=sequence,
            sequence_start=start,
            sequence_end=end,
            path=path,
        ) as result:
            assert result.path == path
            sums.append(result["SUM"].item())
    assert sums == [1, 10, 3, 30, 6]


def test_a_stateful_model_wants_a_sequence(any_client: AnyClient, path: PathName) -> None:
    with pytest.raises(InferenceError, match="must specify a non-zero or non-empty correlation ID"):
        any_client.infer("running_sum", {"X": np.array([1], np.float32)}, path=path)
