"""What the doctor makes of servers and models that behave in ways that a real one can hardly be brought to."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pytest

from shm_backend_utils import __version__
from shm_backend_utils.cli.doctor import checkup
from shm_backend_utils.cli.doctor.examination import examine
from shm_backend_utils.client.errors import DeadlineExceededError, InferenceError, ServerUnavailableError
from shm_backend_utils.client.transports.transport import AsyncTransport, Transport
from shm_backend_utils.errors import ProbedError, TableError
from shm_backend_utils.protocol.address import GENERATION_PARAMETER, SLOT_PARAMETER, parse_address
from shm_backend_utils.protocol.probe import ALIVE_ADDRESS, decode_probe, digest_of, is_probe
from shm_backend_utils.protocol.refusals import refusal
from tests.opened import open_region
from tests.unit.fake_server import FakeServer, Order, config
from tests.unit.fake_wires import FakeTransport

ANSWERED: Final = InferenceError(refusal(ProbedError("the report is in the client's memory")), "400")


class Server(FakeServer):
    """A fake server that the doctor connects to, and what it does with a probe."""

    def __init__(self, *configs: dict[str, Any], protocol: str = "grpc") -> None:
        super().__init__(*configs)
        self.protocol = protocol
        self.probed: Callable[[Order], Any] = lambda order: None
        self.lives: Callable[[Order], Any] = lambda order: {}

    def __enter__(self) -> Server:
        return self

    def infer(self, order: Order) -> Any:
        return (self.lives if order.parameters[SLOT_PARAMETER] == ALIVE_ADDRESS else self.probed)(order)

    def connect(self) -> Transport:
        """Return a transport for threads."""
        return FakeTransport(self, self.protocol)

    def connect_async(self) -> AsyncTransport:
        """Not called."""
        raise AssertionError


def codes(server: Server, model: str | None = None) -> set[str]:
    return {each.trouble.code for each in examine(server, model).findings}


def writes(report: bytes, *, completes: bool = True) -> Callable[[Order], Any]:
    """Return what claims to answer a probe, and writes this."""

    def answer(order: Order) -> Any:
        address = parse_address(order.parameters[SLOT_PARAMETER])
        region = open_region(address.key, address.token)
        try:
            data = bytes(region.record(0).request)
            assert is_probe(data)
            found = decode_probe(data, region.data_offset, region.header.byte_size)
            region.bytes()[found.report.offset : found.report.offset + len(report)] = np.frombuffer(report, np.uint8)
            if completes:
                region.record(0).complete(order.parameters[GENERATION_PARAMETER], bytes(8))
        finally:
            region.close()
        raise ANSWERED

    return answer


def reports(told: dict[str, Any] | bytes) -> Callable[[Order], Any]:
    """Return what answers a probe with a report on its nonce, and with whatever else; or with these bytes."""

    def answer(order: Order) -> Any:
        address = parse_address(order.parameters[SLOT_PARAMETER])
        region = open_region(address.key, address.token)
        try:
            found = decode_probe(bytes(region.record(0).request), region.data_offset, region.header.byte_size)
            nonce = region.bytes()[found.nonce.offset : found.nonce.offset + found.nonce.byte_size].tobytes()
        finally:
            region.close()
        text = told if isinstance(told, bytes) else json.dumps({"digest": digest_of(nonce), **told}).encode()
        return writes(text)(order)

    return answer


def raises(error: Exception) -> Callable[[Order], Any]:
    def answer(order: Order) -> Any:
        raise error

    return answer


@pytest.mark.parametrize("protocol", ["grpc", "http"])
@pytest.mark.parametrize(
    "report",
    [b"no JSON", b"[]", b'{"version": "0.1.0"}', b'{"digest": "00", "version": "0.1.0"}'],
    ids=["no JSON", "no object", "no digest", "another digest"],
)
def test_a_report_on_another_nonce_is_none(protocol: str, report: bytes) -> None:
    with Server(config("m"), protocol=protocol) as server:
        server.probed = writes(report)
        assert codes(server) == {"wrong-report"}


def test_a_model_that_only_says_that_it_has_answered() -> None:
    with Server(config("m")) as server:
        server.probed = writes(b"", completes=False)
        assert codes(server) == {"wrong-report"}


def test_a_model_that_answers_as_if_it_were_a_request() -> None:
    with Server(config("m")) as server:
        server.probed = lambda order: {}
        assert codes(server) == {"no-session"}


def test_a_model_that_is_busy() -> None:
    with Server(config("m")) as server:
        server.probed = raises(DeadlineExceededError("no answer", "StatusCode.DEADLINE_EXCEEDED"))
        assert codes(server) == {"model-busy"}


DEAD: Final = InferenceError("Stub process 'm_0_1' is not healthy.", "StatusCode.INTERNAL")


@pytest.mark.parametrize("first", range(3))
@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_a_model_of_which_one_process_is_dead(protocol: str, first: int) -> None:
    turn = itertools.count(first)

    def answer(order: Order) -> Any:
        if next(turn) % 3 == 1:
            raise DEAD
        if order.parameters[SLOT_PARAMETER] == ALIVE_ADDRESS:  # a session of an earlier release
            raise InferenceError(refusal(TableError("shm_slot", "'2/alive'", "a slot")), "400")
        return reports({"version": __version__})(order)

    with Server(config("m", instance_group=[{"kind": "KIND_CPU", "count": 3}]), protocol=protocol) as server:
        server.probed = server.lives = answer
        told = examine(server)
    found = {each.trouble.code: each.found for each in told.findings if each.model}
    assert found == {"dead-instance": "1 of 3 requests, one after another, met a dead process"}
    assert any("has read a nonce" in line for _, line in told.fine)


def test_a_model_of_which_all_processes_are_dead() -> None:
    with Server(config("m", instance_group=[{"kind": "KIND_CPU", "count": 3}])) as server:
        server.probed = server.lives = raises(DEAD)
        assert codes(server) == {"dead-stub"}


def test_a_model_whose_calls_of_others_find_no_memory() -> None:
    with Server(config("m")) as server:
        server.lives = raises(InferenceError("shm:machine: the last 3 calls of other models have failed", "503"))
        server.probed = reports({"version": __version__})
        assert codes(server) == {"forward-fails"}


@pytest.mark.parametrize(
    ("version", "found"), [("2.51.0", {"ordinary-model", "life-unknown"}), ("2.65.0", {"ordinary-model"})]
)
def test_a_model_of_which_nobody_tells_whether_it_lives(
    version: str, found: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Server(config("m", parameters={})) as server:
        metadata, told = server.metadata, {**server.metadata(""), "version": version}
        monkeypatch.setattr(server, "metadata", lambda name: metadata(name) if name else told)
        transport = server.connect()
        transport.codec.address = "grpc://192.0.2.1:8001"
        monkeypatch.setattr(server, "connect", lambda: transport)
        assert codes(server) == found


def test_a_server_that_goes_meanwhile() -> None:
    with Server(config("m")) as server:
        server.probed = raises(ServerUnavailableError("the connection broke"))
        assert codes(server) == {"server-not-reachable"}


def test_a_server_that_registers_no_clients_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    with Server(config("m")) as server:
        server.probed = lambda order: {}
        error = InferenceError("client shared memory is not allowed; start with --allow-client-shm=true", "400")
        monkeypatch.setattr(server, "register", lambda *_: (_ for _ in ()).throw(error))
        assert "client-shm-disabled" in codes(server)


def test_a_server_that_is_not_ready() -> None:
    with Server() as server:
        server.is_ready = False
        assert codes(server) == {"server-not-ready", "no-models"}


@pytest.mark.parametrize("told", [{"name": "x"}, {"name": 1, "version": "2", "extensions": []}, {}])
def test_a_server_that_is_not_triton(told: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with Server(protocol="http") as server:
        monkeypatch.setattr(server, "metadata", lambda name: told)
        assert codes(server) == {"not-triton"}


def test_what_is_not_examined_in_time_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with Server(config("m"), config("n")) as server:
        server.probed = lambda order: {}
        over = itertools.chain([False], itertools.repeat(True))
        monkeypatch.setattr(checkup.Checkup, "is_over", property(lambda _: next(over)))
        (late,) = [each for each in examine(server).findings if each.trouble.code == "out-of-time"]
        assert (late.found, late.trouble.is_fatal) == ("not examined: n", True)
