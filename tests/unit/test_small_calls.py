"""Small calls in band; outputs in the response; who is told of copies; and where the short way would go wrong."""

from __future__ import annotations

import asyncio
import inspect
import warnings
import weakref
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest

from shm_backend_utils.client import CallerError, CopyWarning, PathUnavailableError, ShmClient
from shm_backend_utils.client.calls import infer
from shm_backend_utils.client.known_model import KnownModel
from shm_backend_utils.client.steps import until_copied
from shm_backend_utils.errors import PeerError
from shm_backend_utils.gpu.memory.access import CudaAccess
from shm_backend_utils.memory.pool.pool import SlotPool
from shm_backend_utils.model_spec import ModelSpec
from tests.unit.fake_server import FakeServer, Order, config
from tests.unit.fake_wires import async_client_of, client_of
from tests.unit.gpu.fakes import runtime_that_gives_all_back

FIXED = config("fixed", dims="16")
UNKNOWN = config("unknown")
LIMIT = 4096
ALIGNMENT = 256


def path_of(client: ShmClient, model: str, count: int = 16, **more: Any) -> str | None:
    x = np.arange(count, dtype=np.float32)
    with client.infer(model, {"IN0": x}, **more) as result:
        np.testing.assert_array_equal(result["OUT0"], 2 * x)
        return result.path


def hinted(count: int) -> dict[str, Any]:
    return {"count": count, "outputs": {"OUT0": 4 * count}}


ALONE = {**FIXED, "parameters": {"SHM_PATHS": {"string_value": "direct"}}}
REGISTERED = {**FIXED, "parameters": {"SHM_PATHS": {"string_value": "triton-shm,inline"}}}
LIMITED = {"inline_bytes": LIMIT}


@pytest.mark.filterwarnings("error")  # nobody is warned of what is meant
@pytest.mark.parametrize(
    ("model", "call", "named", "way"),
    [
        (FIXED, {}, {}, "inline"),
        (FIXED, {}, {"inline_bytes": 0}, "direct"),
        (FIXED, {"path": "direct"}, {}, "direct"),
        (FIXED, {}, {"path": "direct"}, "direct"),
        (FIXED, {}, {"protocol": "http"}, "direct"),
        (FIXED, {}, {"protocol": "http", **LIMITED}, "inline"),
        (ALONE, {}, {}, "direct"),
        (REGISTERED, {}, {}, "triton-shm"),
        (UNKNOWN, hinted(16), {}, "inline"),
        (UNKNOWN, {}, LIMITED, "direct"),  # nobody knows its output's size
        (UNKNOWN, hinted(LIMIT // 8), LIMITED, "inline"),
        (UNKNOWN, hinted(LIMIT // 8 + 1), LIMITED, "direct"),
        (UNKNOWN, {"count": 1, "outputs": {"OUT0": LIMIT - ALIGNMENT}}, LIMITED, "inline"),
        (UNKNOWN, {"count": 1, "outputs": {"OUT0": LIMIT - ALIGNMENT + 1}}, LIMITED, "direct"),
    ],
)
def test_small_sizes_go_in_band(model: dict[str, Any], call: dict[str, Any], named: dict[str, Any], way: str) -> None:
    with FakeServer(model) as server, client_of(server, **named) as client:
        assert [path_of(client, model["name"], **call) for _ in range(3)] == [way] * 3
        assert (client.stats().pool_bytes == 0) == (way == "inline")


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
    for model, inline_bytes in ((FIXED, 0), (ALONE, None)):
        with FakeServer(model) as server, client_of(server, inline_bytes=inline_bytes) as client:
            assert "small calls?" not in str(client.explain("fixed"))


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


def test_who_copies_nothing_or_little_or_means_it_is_told_nothing(server: FakeServer, told: list[Any]) -> None:
    server.configs["small"] = config("small", dims="6", parameters={})
    with client_of(server) as client:
        for _ in range(2):
            client.infer("fixed", {"IN0": X})
        client.infer("small", {"IN0": X[:6]})
        client.infer("m", {"IN0": X[:6]})
        client.prepare("small", {"IN0": ((6,), X.dtype)}).close()
        client.infer("plain", {"IN0": X}, path="triton-shm")
        client.infer("fixed", {"IN0": X}, path="inline")
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
    assert text.endswith("; to accept that, give path='triton-shm'")


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
    end = "; to accept that, give path='inline'"
    first, second = (str(each.message) for each in told)
    assert first.startswith(begin.format("stock") + "model 'stock' does not declare the direct path")
    assert first.endswith(end)
    why = "a stream needs a decoupled model on the direct path; ask by infer() for its one response"
    assert second == begin.format("single") + why + end


def test_a_stream_of_strings_never_goes_in_band_by_itself_as_it_may_end_the_model() -> None:
    with FakeServer(config("m", dtype="TYPE_STRING")) as server, client_of(server) as client:
        with pytest.raises(PathUnavailableError, match="model 'm' cannot stream on the path 'direct': .* infer"):
            list(client.stream("m", {"IN0": ["a"]}))
        assert not server.orders


def test_an_output_that_finds_no_room_is_told_once(server: FakeServer, client: ShmClient, told: list[Any]) -> None:
    server.configs["n"] = config("n")
    for count in (6, 16_384, 20_000):
        client.infer("m", {"IN0": np.ones(count, np.float32)})
    with client.prepare("n", {"IN0": (X.shape, X.dtype)}) as call:
        assert [bool(call.infer().overflowed) for _ in range(2)] == [True, False]
    first, second = (str(each.message) for each in told)
    assert first == (
        "output 'OUT0' of model 'm' needs 65536 bytes and found less room in shared memory, so it came back through "
        "Triton, which copies it; later calls have room for as much; to give it room at once, list it with the "
        "other outputs that you want: outputs={'OUT0': 65536}"
    )
    assert "the next infer of this call has room for as much on the host; to give it room" in second


def test_prepared_calls_and_new_configurations_are_told(server: FakeServer, client: ShmClient, told: list[Any]) -> None:
    client.prepare("plain", {"IN0": (X.shape, X.dtype)}).close()
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


FEW = np.arange(6, dtype=np.float32)


def test_inputs_replaced_meanwhile_are_those_of_the_call(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, take_idle = {"IN0": FEW}, SlotPool.take_idle

    def replaced(*given: Any) -> Any:
        inputs["IN0"] = np.ones(600, np.float64)
        return take_idle(*given)

    with client_of(server, inline_bytes=0) as client:
        client.infer("m", inputs).release()
        monkeypatch.setattr(SlotPool, "take_idle", replaced)
        np.testing.assert_array_equal(client.infer("m", inputs)["OUT0"], 2 * FEW)


def test_an_output_of_an_open_type_is_missed_where_it_is_not_there() -> None:
    outputs = [{"name": "OUT0", "data_type": "TYPE_INVALID", "dims": ["-1"]}]
    with (
        FakeServer(config("m") | {"output": outputs}, compute=lambda *_: {}) as server,
        client_of(server) as client,
        pytest.raises(PeerError, match="answered without output 'OUT0'"),
    ):
        client.infer("m", {"IN0": FEW})


def test_tasks_keep_no_array_of_the_users_while_they_wait(server: FakeServer) -> None:
    alive: list[bool] = []

    async def main() -> None:
        async with async_client_of(server, inline_bytes=0) as client:
            for _ in range(2):
                mine = FEW.copy()
                kept = weakref.ref(mine)

                def note(_: Order, kept: weakref.ref[Any] = kept) -> None:
                    alive.append(kept() is not None)

                server.before = note
                call = client.infer("m", {"IN0": mine})
                del mine
                await call

    asyncio.run(main())
    assert alive == [False, False]


def test_a_model_in_band_is_looked_at_again(server: FakeServer) -> None:
    server.configs["m"] = config("m", parameters={"SHM_PATHS": {"string_value": "inline"}})
    with client_of(server) as client:
        assert [client.infer("m", {"IN0": FEW}).path for _ in range(2)] == ["inline", "inline"]
        server.configs["m"] = config("m")
        core: Any = client._core
        core.known["m", ""].seen -= 100
        assert client.infer("m", {"IN0": FEW}).path == "direct"


@pytest.mark.parametrize(
    ("shape", "size"), [((-1, -4), 16), ((0, 2**62), 0), ((2**62, 0), 0), ((0, -5), 0), ((2, 2), 12)]
)
def test_odd_shapes_are_the_servers_error(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], size: int) -> None:
    with FakeServer(config("m", dims="-1,-1")) as server, client_of(server, path="inline") as client:
        x = np.ones((2, 2), np.float32)
        client.infer("m", {"IN0": x}).release()
        transport, send = client._driver.transport, client._driver.transport.send

        def broken(message: Any, timeout_s: float) -> Any:
            answer = send(message, timeout_s)
            answer.outputs[0].shape[:] = shape
            answer.raw_output_contents[0] = bytes(size)
            return answer

        monkeypatch.setattr(transport, "send", broken)
        with pytest.raises(PeerError):
            client.infer("m", {"IN0": x})


def test_names_and_ranks_that_no_table_has_are_known_all_the_same() -> None:
    output = {"name": "O" * 2**16, "data_type": "TYPE_FP32", "dims": ["1"]}
    long = config("m", dims=",".join(["1"] * 300)) | {"output": [output]}
    known = KnownModel(ModelSpec.from_config(long), 1.0)
    assert (known.inputs, known.outputs, known.rooms) == ({}, {}, {})


def test_hints_for_a_split_call_are_for_the_whole(server: FakeServer) -> None:
    server.configs["rows"] = config("rows", max_batch_size=8)
    rows = np.ones((20, 40_000), np.float32)
    with client_of(server) as client:
        result = client.infer("rows", {"IN0": rows}, outputs={"OUT0": rows.nbytes}, split=True)
        assert (result.in_response, result["OUT0"].shape) == ((), rows.shape)


def test_a_models_name_may_have_the_digits_of_a_generation(server: FakeServer) -> None:
    name = "m1000000000000000000"
    server.configs[name] = config(name)
    with client_of(server, "http") as client:
        for _ in range(3):
            np.testing.assert_array_equal(client.infer(name, {"IN0": FEW})["OUT0"], 2 * FEW)
