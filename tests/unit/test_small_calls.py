"""Calls whose tensors are so small that a request in band is faster, and outputs that come with the response."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

from shm_backend_utils.client import CallerError, PoolOptions, ShmClient
from shm_backend_utils.client.calls import infer
from shm_backend_utils.client.steps import until_copied
from shm_backend_utils.gpu.memory.access import CudaAccess
from tests.unit.fake_server import FakeServer, config
from tests.unit.fake_wires import client_of
from tests.unit.gpu.fakes import runtime_that_gives_all_back

FIXED = config("fixed", dims="16")
UNKNOWN = config("unknown")
LIMIT = 4096
ALIGNMENT = 256


def path_of(client: ShmClient, model: str, count: int = 16, **more: Any) -> str | None:
    """Return the way of a call's tensors, whose values are right."""
    x = np.arange(count, dtype=np.float32)
    with client.infer(model, {"IN0": x}, **more) as result:
        np.testing.assert_array_equal(result["OUT0"], 2 * x)
        return result.path


def hinted(count: int) -> dict[str, Any]:
    return {"count": count, "outputs": {"OUT0": 4 * count}}


@pytest.mark.filterwarnings("error")  # nobody is warned of what is meant
def test_small_tensors_of_certain_sizes_go_in_band_over_grpc() -> None:
    with FakeServer(FIXED, UNKNOWN) as server, client_of(server, pool=PoolOptions(max_bytes=2**20)) as client:
        assert [path_of(client, "fixed") for _ in range(3)] == ["inline"] * 3
        assert path_of(client, "unknown", **hinted(16)) == "inline"
        assert client.stats().pool_bytes == 0


def test_the_limit_counts_inputs_and_outputs_together() -> None:
    with FakeServer(UNKNOWN) as server, client_of(server, inline_bytes=LIMIT) as client:
        assert [path_of(client, "unknown") for _ in range(3)] == ["direct"] * 3  # nobody knows its output's size
    with FakeServer(UNKNOWN) as server, client_of(server, inline_bytes=LIMIT) as client:
        most = LIMIT // 2 // 4
        assert path_of(client, "unknown", **hinted(most)) == "inline"
        assert path_of(client, "unknown", **hinted(most + 1)) == "direct"
        assert path_of(client, "unknown", count=1, outputs={"OUT0": LIMIT - ALIGNMENT}) == "inline"
        assert path_of(client, "unknown", count=1, outputs={"OUT0": LIMIT - ALIGNMENT + 1}) == "direct"


def test_a_path_by_name_is_taken_at_any_size() -> None:
    with FakeServer(FIXED) as server, client_of(server) as client:
        assert path_of(client, "fixed", path="direct") == "direct"
    with FakeServer(FIXED) as server, client_of(server, path="direct") as client:
        assert path_of(client, "fixed") == "direct"


def test_nothing_is_small_over_http_unless_it_is_said() -> None:
    with FakeServer(FIXED) as server, client_of(server, "http") as client:
        assert path_of(client, "fixed") == "direct"
    with FakeServer(FIXED) as server, client_of(server, "http", inline_bytes=LIMIT) as client:
        assert path_of(client, "fixed") == "inline"
    with FakeServer(FIXED) as server, client_of(server, inline_bytes=0) as client:
        assert path_of(client, "fixed") == "direct"


def test_a_model_that_takes_nothing_in_band_gets_nothing_in_band() -> None:
    alone = {**FIXED, "parameters": {"SHM_PATHS": {"string_value": "direct"}}}
    with FakeServer(alone) as server, client_of(server) as client:
        assert path_of(client, "fixed") == "direct"
        assert "small calls?" not in str(client.explain("fixed"))
    registered = {**FIXED, "parameters": {"SHM_PATHS": {"string_value": "triton-shm,inline"}}}
    with FakeServer(registered) as server, client_of(server) as client:
        assert path_of(client, "fixed") == "triton-shm"


def test_strings_do_not_go_in_band_where_they_can_be_shared() -> None:
    """A stub that was built for NumPy 1 dies of those that come with a request, if the model has NumPy 2."""
    words = config("words", dims="2", dtype="TYPE_STRING")
    numbers_of_words = {**FIXED, "input": words["input"]}
    words_of_numbers = {**FIXED, "output": words["output"], "name": "words"}
    with FakeServer(numbers_of_words, words_of_numbers) as server, client_of(server) as client:
        server.compute = lambda order, _: {
            "OUT0": np.zeros(16, np.float32) if order.model == "fixed" else np.array([b"a", b"b"], object)
        }
        with client.infer("fixed", {"IN0": np.array([b"a", b"b"], object)}) as result:
            assert result.path == "direct"
        with client.infer("words", {"IN0": np.zeros(16, np.float32)}, outputs={"OUT0": 100}) as result:
            assert result.path == "direct"
        assert "small calls?" not in str(client.explain("fixed"))


def test_explain_tells_of_small_calls() -> None:
    with FakeServer(FIXED, UNKNOWN) as server, client_of(server) as client:
        assert "if the call's outputs= has the size of OUT0" in str(client.explain("unknown"))
        found = client.explain("fixed")
        assert "outputs=" not in str(found)
        assert found.path == "direct"
        assert "small calls?" in str(found)
        assert "up to 16,384 bytes together go inline" in str(found)
        assert "inline_bytes=0" in str(found)
    with FakeServer(FIXED) as server, client_of(server, inline_bytes=0) as client:
        assert "small calls?" not in str(client.explain("fixed"))


def test_prepared_calls_have_memory_at_any_size() -> None:
    with (
        FakeServer(FIXED) as server,
        client_of(server) as client,
        client.prepare("fixed", {"IN0": ((16,), np.float32)}) as call,
    ):
        call.inputs["IN0"][...] = 1
        with call.infer() as result:
            assert result.path == "direct"


@pytest.mark.parametrize("value", [-1, 1.5, "16 KiB"])
def test_what_is_no_number_of_bytes_is_refused(value: Any) -> None:
    with pytest.raises(CallerError, match="inline_bytes is .*; expected a whole number of bytes"):
        ShmClient("localhost:1", inline_bytes=value)


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
