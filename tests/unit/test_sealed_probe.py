"""Which memory a client takes: sealed where the model can fetch it, which is tried once, else that of /dev/shm."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.client import CopyWarning, InferenceError, PathUnavailableError, ShmClient
from shm_backend_utils.client.explanation import Check
from shm_backend_utils.errors import RegionGoneError, RegionRefusedError, ShmError
from shm_backend_utils.memory.pool.options import PoolOptions
from shm_backend_utils.protocol.address import SLOT_PARAMETER, parse_address
from shm_backend_utils.protocol.handover import parse_sealed_key
from shm_backend_utils.protocol.refusals import refusal
from tests.unit.fake_server import FakeServer, Order, config
from tests.unit.fake_wires import client_of

X = np.arange(6, dtype=np.float32)
PROBE = "sealed memory?"


class BlindServer(FakeServer):
    """Its models cannot fetch sealed memory, for a reason that may change; it counts the requests that tell that."""

    def __init__(self, *configs: dict[str, Any]) -> None:
        super().__init__(*configs)
        self.error: ShmError | None = RegionGoneError("regions[0] is handed over by nobody")
        self.refused = 0

    def infer(self, order: Order) -> Any:
        if SLOT_PARAMETER in order.parameters and is_sealed(order) and self.error is not None:
            self.refused += 1
            raise InferenceError(refusal(self.error), "StatusCode.INTERNAL")
        return super().infer(order)


def is_sealed(order: Order) -> bool:
    return parse_sealed_key(parse_address(order.parameters[SLOT_PARAMETER]).key) is not None


@pytest.fixture
def blind() -> Iterator[BlindServer]:
    server = BlindServer(config("m"))
    with server:
        yield server


def check_of(client: ShmClient, name: str = PROBE) -> Check | None:
    return next((check for check in client.explain("m").checks if check.name == name), None)


def infer(client: ShmClient) -> None:
    np.testing.assert_array_equal(client.infer("m", {"IN0": X})["OUT0"], 2 * X)


def own_files() -> list[Path]:
    return list(Path("/dev/shm").glob(f"shmbu-{os.getpid()}-*"))


def test_memory_is_sealed_where_the_model_can_fetch_it(server: FakeServer) -> None:
    with client_of(server) as client:
        for _ in range(3):
            infer(client)
        assert [is_sealed(order) for order in server.orders] == [True] * 3, "the probe is no request that it sees"
        assert not own_files()
        check = check_of(client)
        assert check is not None
        assert (check.outcome, check.needed_by) == (True, ())


@pytest.mark.parametrize(
    "error",
    [RegionGoneError("regions[0] is handed over by nobody"), RegionRefusedError("regions[0]", "too late")],
    ids=["gone", "refused"],
)
def test_else_it_lies_in_dev_shm(blind: BlindServer, error: ShmError) -> None:
    blind.error = error
    with client_of(blind) as client:
        for _ in range(3):
            infer(client)
        assert blind.refused == 1
        assert [is_sealed(order) for order in blind.orders] == [False] * 3
        check = check_of(client)
        assert check is not None
        assert check.outcome is False
        assert str(error) in check.detail
        assert client.explain("m").path == "direct"


def test_to_look_again_is_to_try_again(blind: BlindServer) -> None:
    with client_of(blind) as client:
        infer(client)
        blind.error = None
        client.explain("m")
        infer(client)
        assert [is_sealed(order) for order in blind.orders] == [False, True]


def test_who_wants_none_is_asked_for_none(server: FakeServer) -> None:
    with client_of(server, pool=PoolOptions(region="system")) as client:
        infer(client)
        assert [is_sealed(order) for order in server.orders] == [False]
        assert check_of(client) is None


def test_a_model_that_is_closed_to_direct_is_not_probed() -> None:
    closed = config("m", parameters={"SHM_PATHS": {"string_value": "triton-shm,inline"}})
    blind = BlindServer(closed)
    with blind, client_of(blind) as client:
        assert check_of(client) is None
        assert blind.refused == 0


def test_who_wants_sealed_memory_alone_is_told_that_there_is_none(blind: BlindServer) -> None:
    with client_of(blind, pool=PoolOptions(region="sealed")) as client:
        with pytest.raises(PathUnavailableError, match="could not fetch it.*handed over by nobody"):
            client.infer("m", {"IN0": X}, path="direct")
        assert client.explain("m").path != "direct"
        assert not blind.orders


def refuse_sealed(order: Order) -> None:
    if SLOT_PARAMETER in order.parameters and is_sealed(order):
        raise InferenceError(refusal(RegionRefusedError(SLOT_PARAMETER, "the server closes too much")))


def test_sealed_memory_alone_that_is_refused_later_is_replaced_by_another_path(
    server: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    with client_of(server, pool=PoolOptions(region="sealed")) as client, caplog.at_level(logging.WARNING):
        infer(client)
        server.before = refuse_sealed
        infer(client)
        seen = len(server.orders)
        infer(client)
        assert not [order for order in server.orders[seen:] if SLOT_PARAMETER in order.parameters]
    assert "take memory in /dev/shm" not in caplog.text


def test_memory_that_is_refused_later_is_replaced_by_that_of_dev_shm(
    server: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    with client_of(server) as client:
        infer(client)
        server.before = refuse_sealed
        with caplog.at_level(logging.WARNING):
            infer(client)
        assert "take memory in /dev/shm from now on" in caplog.text
        seen = len(server.orders)
        infer(client)
        assert [is_sealed(order) for order in server.orders[seen:]] == [False]
        assert client.stats().failures == 0


def test_a_refusal_of_other_memory_leaves_the_sealed(server: FakeServer, caplog: pytest.LogCaptureFixture) -> None:
    def refuse_slots(order: Order) -> None:
        if SLOT_PARAMETER in order.parameters:
            raise InferenceError(refusal(RegionRefusedError("regions[1]", "the GPU is another")))

    with client_of(server) as client:
        infer(client)
        server.before = refuse_slots
        with caplog.at_level(logging.WARNING):
            infer(client)
        assert "take memory in /dev/shm from now on" not in caplog.text
        assert all(is_sealed(order) for order in server.orders if SLOT_PARAMETER in order.parameters)


def test_what_one_model_can_do_without_another_one_still_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither shares /dev/shm with the client, and one cannot fetch sealed memory."""

    class Pod(FakeServer):
        def register(self, name: str, key: str, byte_size: int) -> None:
            raise InferenceError(f"Unable to open shared memory region: '{key}'", "StatusCode.INTERNAL")

        def infer(self, order: Order) -> Any:
            if order.model == "blind" and SLOT_PARAMETER in order.parameters:
                raise InferenceError(refusal(RegionGoneError("regions[0] is handed over by nobody")), "400")
            return super().infer(order)

    server = Pod(config("sees"), config("blind"))
    with server, client_of(server, inline_bytes=0) as client, warnings.catch_warnings():
        warnings.simplefilter("ignore", CopyWarning)
        assert client.infer("sees", {"IN0": X}).path == "direct"
        assert client.infer("blind", {"IN0": X}).path == "inline"
        assert client.explain("sees").path == "direct"
        assert client.explain("blind").path == "inline"


@pytest.mark.parametrize(
    "answer",
    [("Stub process 'm_0' is not healthy.", "StatusCode.INTERNAL"), ("must specify a non-zero correlation ID", "400")],
    ids=["dead", "sequence"],
)
def test_an_answer_that_says_nothing_of_memory_leaves_it_to_a_call(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, answer: tuple[str, str]
) -> None:
    def refuse(_: FakeServer, order: Order) -> None:
        raise InferenceError(*answer)

    monkeypatch.setattr(FakeServer, "_refuse_trial", refuse)
    with client_of(server) as client:
        check = check_of(client)
        assert check is not None
        assert check.outcome is None
        monkeypatch.undo()
        infer(client)
        assert [is_sealed(order) for order in server.orders] == [True]
