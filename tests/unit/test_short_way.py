"""The short way of calls where a shortcut would go wrong: what changes meanwhile, and answers that are not usual."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.client import ShmClient
from shm_backend_utils.client.known_model import KnownModel
from shm_backend_utils.errors import PeerError
from shm_backend_utils.memory.pool.pool import SlotPool
from shm_backend_utils.model_spec import ModelSpec
from tests.unit.fake_server import FakeServer, Order, config
from tests.unit.fake_wires import async_client_of, client_of

X = np.arange(6, dtype=np.float32)
NAME = "m1000000000000000000"


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer(config("m"), config(NAME)) as server:
        yield server


@pytest.fixture
def client(server: FakeServer) -> Iterator[ShmClient]:
    with client_of(server, inline_bytes=0) as client:
        client.infer("m", {"IN0": X}).release()
        yield client


def test_inputs_that_are_replaced_meanwhile_are_those_of_the_call(
    client: ShmClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, take_idle = {"IN0": X}, SlotPool.take_idle

    def replaced(*given: Any) -> Any:
        inputs["IN0"] = np.ones(600, np.float64)
        return take_idle(*given)

    monkeypatch.setattr(SlotPool, "take_idle", replaced)
    np.testing.assert_array_equal(client.infer("m", inputs)["OUT0"], 2 * X)


def test_an_output_of_an_open_type_is_missed_where_it_is_not_there() -> None:
    outputs = [{"name": "OUT0", "data_type": "TYPE_INVALID", "dims": ["-1"]}]
    with (
        FakeServer(config("m") | {"output": outputs}, compute=lambda *_: {}) as server,
        client_of(server) as client,
        pytest.raises(PeerError, match="answered without output 'OUT0'"),
    ):
        client.infer("m", {"IN0": X})


def test_tasks_keep_no_array_of_the_users_while_they_wait(server: FakeServer) -> None:
    alive: list[bool] = []

    async def main() -> None:
        async with async_client_of(server, inline_bytes=0) as client:
            for _ in range(2):
                mine = X.copy()
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
        assert [client.infer("m", {"IN0": X}).path for _ in range(2)] == ["inline", "inline"]
        server.configs["m"] = config("m")
        core: Any = client._core
        core.known["m", ""].seen -= 100
        assert client.infer("m", {"IN0": X}).path == "direct"


@pytest.mark.parametrize(
    ("shape", "size"), [((-1, -4), 16), ((0, 2**62), 0), ((2**62, 0), 0), ((0, -5), 0), ((2, 2), 12)]
)
def test_shapes_in_band_that_no_array_has_are_the_servers_error(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], size: int
) -> None:
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
    long = config("m", dims=",".join(["1"] * 300)) | {
        "output": [{"name": "O" * 2**16, "data_type": "TYPE_FP32", "dims": ["1"]}]
    }
    known = KnownModel(ModelSpec.from_config(long), 1.0)
    assert (known.inputs, known.outputs, known.rooms) == ({}, {}, {})


def test_hints_for_a_split_call_are_for_the_whole(server: FakeServer) -> None:
    server.configs["rows"] = config("rows", max_batch_size=8)
    rows = np.ones((20, 40_000), np.float32)
    with client_of(server) as client:
        result = client.infer("rows", {"IN0": rows}, outputs={"OUT0": rows.nbytes}, split=True)
        assert (result.in_response, result["OUT0"].shape) == ((), rows.shape)


def test_a_models_name_may_have_the_digits_of_a_generation(server: FakeServer) -> None:
    with client_of(server, "http") as client:
        for _ in range(3):
            np.testing.assert_array_equal(client.infer(NAME, {"IN0": X})["OUT0"], 2 * X)
