"""Small calls, outputs in the response, and the warnings of copies."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest

from shm_backend_utils.client import CopyWarning, ShmClient
from shm_backend_utils.client.calls import infer
from shm_backend_utils.client.steps import until_copied
from shm_backend_utils.gpu.memory.access import CudaAccess
from tests.unit.fake_server import FakeServer, config
from tests.unit.fake_wires import client_of
from tests.unit.gpu.fakes import runtime_that_gives_all_back

FIXED = config("fixed", dims="16")


def test_a_small_output_on_a_gpu_is_written_there() -> None:
    x = np.zeros(16, np.float32)
    with (
        runtime_that_gives_all_back() as cuda,
        FakeServer(FIXED) as server,
        client_of(server, cuda=CudaAccess(lambda: cuda)) as client,
    ):
        core = client._core
        assert core is not None
        settings = client._settings.of_call("infer", "fixed", None, None, {})
        operation = infer(core, settings, {"IN0": x}, {"OUT0": ((16,), np.float32, "cuda:0")})
        client._driver.run(until_copied(operation))
        assert cast(Any, operation).gi_frame.f_locals["call"].path == "direct"
        operation.close()


def test_a_result_tells_which_came_with_the_response_though_the_path_shares_memory() -> None:
    x = np.ones(4, np.float32)
    with FakeServer(config("m")) as server, client_of(server) as client:
        open_size = client.infer("m", {"IN0": x}, path="triton-shm")
        assert (list(open_size.in_response), dict(open_size.overflowed)) == (["OUT0"], {})
        assert repr(open_size) == "<Result path=triton-shm 'OUT0' float32 [4] in_response=['OUT0']>"
        told = client.infer("m", {"IN0": x}, path="triton-shm", outputs={"OUT0": x.nbytes})
        assert list(told.in_response) == []
        assert repr(told) == "<Result path=triton-shm 'OUT0' float32 [4]>"
        overflowed = client.infer("m", {"IN0": x}, path="direct")
        assert list(overflowed.in_response) == ["OUT0"]
        assert list(client.infer("m", {"IN0": x}, path="direct").in_response) == []
        assert list(client.infer("m", {"IN0": x}, path="inline").in_response) == ["OUT0"]


X = np.arange(2**14, dtype=np.float32)  # 64 KiB, from which on copies matter


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer(config("m"), config("fixed", dims="16384"), config("plain", dims="16384", parameters={})) as server:
        yield server


@pytest.fixture
def client(server: FakeServer) -> Iterator[ShmClient]:
    with client_of(server) as client:
        yield client


@pytest.fixture
def told() -> Iterator[list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught


def test_a_call_that_copies_nothing_is_silent(client: ShmClient, told: list[Any]) -> None:
    for _ in range(2):
        client.infer("fixed", {"IN0": X})
    assert told == []


def test_a_path_that_copies_is_told_once_with_its_reason_at_the_users_line(client: ShmClient, told: list[Any]) -> None:
    frame = inspect.currentframe()
    assert frame is not None
    line = frame.f_lineno + 2
    for _ in range(3):
        client.infer("plain", {"IN0": X})
    (warning,) = told
    assert (warning.category, warning.filename, warning.lineno) == (CopyWarning, __file__, line)
    text = str(warning.message)
    assert text.startswith(
        "model 'plain' is called on the path triton-shm, which copies its inputs once and its outputs twice: "
        "model 'plain' does not declare the direct path"
    )
    assert text.endswith("; if that is meant, say path='triton-shm'")


def test_what_is_copied_in_no_time_is_not_told(server: FakeServer, told: list[Any]) -> None:
    server.configs["small"] = config("small", dims="6", parameters={})
    with client_of(server) as client:
        client.infer("small", {"IN0": X[:6]})
        client.infer("m", {"IN0": X[:6]})
        client.prepare("small", {"IN0": ((6,), X.dtype)}).close()
    assert told == []


def test_a_stream_that_goes_in_band_is_told_of_that_path(told: list[Any]) -> None:
    policy = {"decoupled": True}
    stock, single = config("stock", model_transaction_policy=policy, parameters={}), config("single", dims="16384")
    ours = config("ours", model_transaction_policy=policy)
    compute = lambda _, inputs: iter([{"OUT0": inputs["IN0"]}])  # noqa: E731
    with FakeServer(stock, single, ours, compute=compute) as server, client_of(server) as client:
        for model in ("stock", "single", "ours"):
            for _ in range(2):
                list(client.stream(model, {"IN0": X}, outputs={"OUT0": X.nbytes}))
            list(client.stream(model, {"IN0": X}, path="inline"))
    begin = "model {!r} is called on the path inline, which copies every tensor several times: "
    end = "; if that is meant, say path='inline'"
    first, second = (str(each.message) for each in told)
    assert first.startswith(begin.format("stock") + "model 'stock' does not declare the direct path")
    assert first.endswith(end)
    why = "a stream needs a decoupled model on the direct path; ask by infer() for its one response"
    assert second == begin.format("single") + why + end


def test_a_path_that_was_asked_for_by_name_is_meant(client: ShmClient, told: list[Any]) -> None:
    client.infer("plain", {"IN0": X}, path="triton-shm")
    client.infer("fixed", {"IN0": X}, path="inline")
    assert told == []


def test_a_prepared_call_is_told_too(client: ShmClient, told: list[Any]) -> None:
    client.prepare("plain", {"IN0": (X.shape, X.dtype)}).close()
    assert [warning.category for warning in told] == [CopyWarning]


def test_an_output_that_finds_no_room_is_told_once_with_its_size(client: ShmClient, told: list[Any]) -> None:
    for count in (6, 16_384, 20_000):
        client.infer("m", {"IN0": np.ones(count, np.float32)})
    (warning,) = told
    assert str(warning.message) == (
        "output 'OUT0' of model 'm' needs 65536 bytes and found less room in shared memory, so it came back through "
        "Triton, which copies it; later calls have room for as much; say it beforehand, beside the "
        "other outputs that you want: outputs={'OUT0': 65536}"
    )


def test_an_output_without_room_in_a_prepared_call_is_told(client: ShmClient, told: list[Any]) -> None:
    with client.prepare("m", {"IN0": (X.shape, X.dtype)}) as call:
        assert call.infer().overflowed
        assert not call.infer().overflowed
    (warning,) = told
    assert "the next infer of this call has room for as much on the host; say it beforehand" in str(warning.message)


def test_another_configuration_is_told_of_anew(server: FakeServer, client: ShmClient, told: list[Any]) -> None:
    client.infer("plain", {"IN0": X})
    server.configs["plain"] = config("plain", dims="-1", parameters={})
    client.explain("plain")  # which has the server asked
    client.infer("plain", {"IN0": X}, outputs={"OUT0": X.nbytes})
    assert [str(warning.message)[:20] for warning in told] == ["model 'plain' is cal"] * 2


def test_a_warning_that_is_an_error_loses_no_memory(client: ShmClient) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(CopyWarning, match="'OUT0'"):
            client.infer("m", {"IN0": X})
    assert client.stats().slots_held == 0
