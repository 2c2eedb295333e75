"""What the doctor makes of servers and models that behave oddly, and of what they say in place of an answer."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import pytest

from shm_backend_utils import __version__
from shm_backend_utils.cli import main
from shm_backend_utils.cli.doctor import checkup, examine, model_checks, server_checks
from shm_backend_utils.cli.doctor.checkup import Finding
from shm_backend_utils.cli.doctor.model_checks import finding_of_refusal
from shm_backend_utils.client import errors as client_errors
from shm_backend_utils.client.errors import DeadlineExceededError, InferenceError, ServerUnavailableError
from shm_backend_utils.client.paths.choice import ProbeAnswer
from shm_backend_utils.client.transports.transport import AsyncTransport, Transport
from shm_backend_utils.errors import ProbedError, RegionGoneError, RegionRefusedError, TableError, VersionError, refusal
from shm_backend_utils.memory.machine import process_facts
from shm_backend_utils.model_spec import CARRIER_LINE, PATHS_LINE, ModelSpec
from shm_backend_utils.protocol.parameters import GENERATION_PARAMETER, SLOT_PARAMETER, parse_address
from shm_backend_utils.protocol.probe import ALIVE_ADDRESS, decode_probe, digest_of, is_probe
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
        return FakeTransport(self, self.protocol)

    def connect_async(self) -> AsyncTransport:
        raise AssertionError


def codes(server: Server, model: str | None = None) -> set[str]:
    return {each.trouble.code for each in examine(server, model).findings}


def writes(report: bytes | Callable[[bytes], bytes], *, completes: bool = True) -> Callable[[Order], Any]:
    """Return what claims to answer a probe, and writes this; or what this makes of the nonce."""

    def answer(order: Order) -> Any:
        address = parse_address(order.parameters[SLOT_PARAMETER])
        with contextlib.closing(open_region(address.key, address.token)) as region:
            data = bytes(region.record(0).request)
            assert is_probe(data)
            found, memory = decode_probe(data, region.data_offset, region.header.byte_size), region.bytes()
            nonce = memory[found.nonce.offset : found.nonce.offset + found.nonce.byte_size].tobytes()
            text = report if isinstance(report, bytes) else report(nonce)
            memory[found.report.offset : found.report.offset + len(text)] = np.frombuffer(text, np.uint8)
            if completes:
                region.record(0).complete(order.parameters[GENERATION_PARAMETER], bytes(8))
            del memory
        raise ANSWERED

    return answer


def reports(told: dict[str, Any] | bytes) -> Callable[[Order], Any]:
    """Return what answers a probe with a report on its nonce, and with whatever else; or with these bytes."""
    if isinstance(told, bytes):
        return writes(told)
    return writes(lambda nonce: json.dumps({"digest": digest_of(nonce), **told}).encode())


def lives(order: Order) -> Any:
    return {}


def raises(error: Exception) -> Callable[[Order], Any]:
    def answer(order: Order) -> Any:
        raise error

    return answer


DEAD: Final = InferenceError("Stub process 'm_0_1' is not healthy.", "StatusCode.INTERNAL")
FORWARDING: Final = InferenceError("shm:machine: the last 3 calls of other models have failed", "503")
PROBED: Final = {
    "its report is no JSON": (writes(b"no JSON"), lives, "wrong-report"),
    "its report is no object": (writes(b"[]"), lives, "wrong-report"),
    "its report has no digest": (writes(b'{"version": "0.1.0"}'), lives, "wrong-report"),
    "its report is on another nonce": (writes(b'{"digest": "00", "version": "0.1.0"}'), lives, "wrong-report"),
    "it only says that it has answered": (writes(b"", completes=False), lives, "wrong-report"),
    "it answers as if it were a request": (lives, lives, "no-session"),
    "it is busy": (raises(DeadlineExceededError("no answer", "StatusCode.DEADLINE_EXCEEDED")), lives, "model-busy"),
    "the server goes": (raises(ServerUnavailableError("the connection broke")), lives, "server-not-reachable"),
    "all its processes are dead": (raises(DEAD), raises(DEAD), "dead-stub"),
    "its calls find no memory": (reports({"version": __version__}), raises(FORWARDING), "forward-fails"),
}


@pytest.mark.parametrize("what", PROBED)
def test_a_model_that_answers_otherwise(protocol: str, what: str) -> None:
    probed, life, code = PROBED[what]
    with Server(config("m", instance_group=[{"kind": "KIND_CPU", "count": 3}]), protocol=protocol) as server:
        server.probed, server.lives = probed, life
        assert codes(server) == {code}


@pytest.mark.parametrize("first", range(3))
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
        assert any(PATHS_LINE in each.trouble.remedy for each in examine(server).findings)


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


GONE: Final = refusal(RegionGoneError("shm_slot is handed over by nobody"))
NOT_MINE: Final = refusal(RegionRefusedError("shm_slot", "it belongs to user 4711; add it to SHM_ALLOWED_UIDS"))
ELSEWHERE: Final = "192.0.2.1"
SAID: Final = [
    ("other-protocol", refusal(VersionError("1", 2)), "localhost"),
    ("dead-stub", "Failed to process the request(s) for model 'm_0': Stub process 'm_0' is not healthy.", "localhost"),
    ("other-machine", GONE, ELSEWHERE),
    ("other-namespace", GONE, "localhost"),
    ("other-user", NOT_MINE, "localhost"),
    ("refused", refusal(RegionRefusedError("shm_slot", "it has holes")), "localhost"),
    ("no-session", "KeyError: 'X'", "localhost"),
    ("model-busy", "[request id: <id_unknown>] Exceeds maximum queue size", "localhost"),
]
UUID: Final = "ab" * 16
ANOTHER: Final = "cd" * 16


@pytest.mark.parametrize(("code", "text", "host"), SAID)
def test_a_refusal_has_one_meaning(code: str, text: str, host: str) -> None:
    found = finding_of_refusal(ProbeAnswer(None, text), ProbeAnswer(None, text), host, "m")
    assert (found.trouble.code, found.model) == (code, "m")


def test_memory_of_dev_shm_may_be_another_users_where_sealed_memory_is_only_gone() -> None:
    found = finding_of_refusal(ProbeAnswer(None, NOT_MINE), ProbeAnswer(None, GONE), "localhost", "m")
    assert found.trouble.code == "other-user"


NOT_REACHED: Final = {
    "unknown-host": client_errors.UnknownHostError("this machine cannot resolve the host name in x"),
    "tls": client_errors.TlsError("no TLS connection"),
    "no-answer": DeadlineExceededError("the server did not answer before the deadline"),
    "not-triton": InferenceError("x answered '<html>', which is not an answer of Triton's", "404"),
    "wrong-port": ServerUnavailableError("the server at x speaks HTTP, and not gRPC"),
    "server-not-reachable": ServerUnavailableError("no Triton server answers at x"),
}


@pytest.mark.parametrize("code", NOT_REACHED)
def test_a_server_that_is_not_reached(code: str) -> None:
    assert server_checks.finding_of_error(NOT_REACHED[code]).trouble.code == code


MISSING: Final = "Internal: ModuleNotFoundError: No module named"
INDEX: Final = {
    f"{MISSING} 'shm_backend_utils'\n\nAt:\n  /1/model.py": "library-missing",
    f"{MISSING} 'torch'\n\nAt:\n  /opt/shm_backend_utils/m/1/model.py(1)": "model-not-loaded",
    "shm_backend_utils.errors.ModelError: input 'X' of model 'm' is not optional, so Triton": "required-inputs",
    f"shm_backend_utils.errors.ModelError: … has max_batch_size 8 but …; add input {CARRIER_LINE}": "no-shm-input",
    "Internal: ValueError: no weights": "model-not-loaded",
}


@pytest.mark.parametrize(("reason", "code"), INDEX.items())
def test_the_servers_reason_is_recognised(reason: str, code: str) -> None:
    index = [{"name": "m", "version": "1", "state": "UNAVAILABLE", "reason": reason}]
    (found,) = server_checks._not_loaded(index, [], None)
    assert (found.trouble.code, found.model, "\n" in found.found) == (code, "m", False)


def codes_of(findings: Iterator[Finding]) -> list[str]:
    return [finding.trouble.code for finding in findings]


def spec_of(**more: Any) -> ModelSpec:
    return ModelSpec.from_config(config("m", **more))


REPORTS: Final = [
    ("other-version", {"version": "0.0.1"}, {}),
    ("numpy-2-old-stub", {"stub_reads_numpy": False}, {}),
    ("numpy-2-strings", {"stub_reads_numpy": False}, {"dtype": "TYPE_STRING"}),
    ("names-unusable", {"knows_server": False}, {}),
]


@pytest.mark.parametrize(("code", "told", "more"), REPORTS)
def test_a_report_is_compared(code: str, told: dict[str, Any], more: dict[str, Any]) -> None:
    report = {"version": __version__, "stub_reads_numpy": True, "knows_server": True, "numpy": "2.1"}
    assert codes_of(model_checks.findings_in_report(spec_of(**more), report)) == []
    assert codes_of(model_checks.findings_in_report(spec_of(**more), {**report, **told})) == [code]


HERE: Final = process_facts()
ANOTHER_PID: Final[dict[str, Any]] = {"namespaces": {**HERE["namespaces"], "pid": 1}}
SEES: Final[dict[str, Any]] = {"gpus": {"uuids": [UUID], "obstacle": ""}}
ON_MIG: Final = model_checks.ClientGpus((ANOTHER,), "", {"CUDA_VISIBLE_DEVICES": f"MIG-{ANOTHER}"})
ON_GPU: Final = model_checks.ClientGpus((UUID,))
GPUS: Final[list[tuple[model_checks.ClientGpus, dict[str, Any], list[str]]]] = [
    (ON_GPU, SEES, []),
    (model_checks.ClientGpus(), SEES, []),
    (ON_GPU, {"gpus": {"uuids": [], "obstacle": "libcuda.so.1"}}, ["driver-not-seen"]),
    (model_checks.ClientGpus((), "libcuda.so.1 was not found"), SEES, ["driver-not-seen"]),
    (model_checks.ClientGpus((ANOTHER,)), SEES, ["gpu-not-seen"]),
    (ON_MIG, {**SEES, "visible_devices": {"CUDA_VISIBLE_DEVICES": f"MIG-{UUID}"}}, ["mig"]),
    (ON_GPU, {**SEES, **ANOTHER_PID}, ["pid-namespace"]),
]


@pytest.mark.parametrize(("client", "report", "expected"), GPUS)
def test_gpus_are_compared(client: model_checks.ClientGpus, report: dict[str, Any], expected: list[str]) -> None:
    assert codes_of(model_checks.findings_on_gpus(config("m"), client, report, HERE)) == expected


@pytest.mark.parametrize("url", ["", "http://", "localhost:none", "ftp://localhost:1", "localhost:8001/path", "a b"])
def test_a_url_that_is_none(url: str) -> None:
    found = [each.trouble.code for each in examine(url).findings]
    assert {"bad-url", "unknown-host"} & set(found)


def test_a_folder_needs_no_url(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    assert main(["doctor", "localhost:8001", "--model-dir", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert main(["doctor", "--model-dir", str(tmp_path / "none")]) == 1
    assert "not-a-model" in capsys.readouterr().out
