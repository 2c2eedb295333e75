"""Errors: one family, sorted by whose fault it is, readable; and how a client tells what went wrong with its server."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from shm_backend_utils import errors
from shm_backend_utils.client import errors as client_errors
from shm_backend_utils.client.errors import (
    InferenceError,
    InputMissingError,
    ServerUnavailableError,
    deadline_exceeded,
    translated,
    unavailable,
)
from shm_backend_utils.errors import CallerError, MachineError, ModelError, PeerError, ShmError, shown

ADDRESS = "grpc://localhost:8001"
UNAVAILABLE = "StatusCode.UNAVAILABLE"


def test_a_wrong_value_is_shown_in_short() -> None:
    shorts: list[tuple[object, str]] = [
        (None, "None"),
        ("cuda", "'cuda'"),
        (np.float32(1.5), repr(np.float32(1.5))),
        ((1, "f4"), "(1, 'f4')"),
        (np.ones(1000), "an object of type ndarray"),
        ([np.ones(1000)], "an object of type list"),
        (object(), "an object of type object"),
        (10**5000, "a number too long to print"),
    ]
    assert [shown(value) for value, _ in shorts] == [text for _, text in shorts]
    assert all(len(shown(value)) < 50 for value in ("x" * 10_000, ["x"] * 10_000))


KINDS = {name: kind for name, kind in (vars(errors) | vars(client_errors)).items() if name.endswith("Error")}
EXAMPLES = {
    "DeadlineExceededError": deadline_exceeded(),
    "InferenceError": InferenceError("refused", "StatusCode.INVALID_ARGUMENT"),
    "InputMissingError": InputMissingError("no 'X'", None, "X"),
    "ServerUnavailableError": ServerUnavailableError("nobody", UNAVAILABLE),
}


@pytest.mark.parametrize("name", [name for name in client_errors.__all__ if name in KINDS])
def test_an_error_survives_pickling_and_reads_as_a_sentence(name: str) -> None:
    error = EXAMPLES.get(name) or KINDS[name]("this went wrong")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert (str(again), again.args, vars(again)) == (str(error), error.args, vars(error))
    assert str(error).rpartition("] ")[2] in repr(error)  # after the status, if it has one
    assert not str(error).startswith("(")


@pytest.mark.parametrize("name", errors.__all__)
def test_an_error_is_the_fault_of_one_side(name: str) -> None:
    kind = getattr(errors, name)
    faults = [fault for fault in (CallerError, PeerError, ModelError, MachineError) if issubclass(kind, fault)]
    assert len(faults) == (0 if kind is ShmError else 1)


# What docs/errors.md says of them besides, test_documents holds against the classes.
BASES = {
    CallerError: "Table Tensor RegionRefused Closed Budget PathUnavailable TimeoutValue",
    ConnectionError: "ServerUnavailable",
    errors.MissingTensorError: "InputMissing",
    errors.TableError: "Version",
    FileNotFoundError: "RegionGone",
    InferenceError: "DeadlineExceeded InputMissing MemoryRefused OutputRoom",
    InferenceServerException: "Inference ServerUnavailable",
    MachineError: "PoolExhausted ServerUnavailable",
    PeerError: "RegionGone StaleRequest ReplayedRequest Inference",
    PermissionError: "RegionRefused",
    RuntimeError: "Closed Forked",
    ServerUnavailableError: "ConnectionLost Tls UnknownHost",
    ValueError: "Table Tensor Budget InputMissing TimeoutValue",
}


@pytest.mark.parametrize("base", BASES)
def test_an_error_is_one_of_python_or_of_tritonclient(base: type[Exception]) -> None:
    assert [name for name in BASES[base].split() if not issubclass(KINDS[f"{name}Error"], base)] == []


def from_grpc(message: str, status: str | None = UNAVAILABLE) -> ShmError:
    return translated(status, message, ADDRESS)


def from_http(message: str) -> ShmError:
    return unavailable("http://localhost:8000", message)


def test_an_answer_with_an_error_keeps_its_status_and_message() -> None:
    error = from_grpc("[request id: 7] expected 3 dimensions", "StatusCode.INVALID_ARGUMENT")
    assert type(error) is InferenceError
    assert isinstance(error, InferenceError)
    assert (error.status(), error.message()) == ("StatusCode.INVALID_ARGUMENT", "[request id: 7] expected 3 dimensions")
    assert "the server gave no reason" in str(from_grpc("", "500"))
    late = from_grpc("Deadline Exceeded", "StatusCode.DEADLINE_EXCEEDED")
    assert type(late) is client_errors.DeadlineExceededError
    assert "did not answer before the deadline" in str(late)
    missing = from_grpc("shm:missing: the request has no input 'IMAGE', which the model needs", "400")
    assert isinstance(missing, InputMissingError)
    assert missing.tensor == "IMAGE"


def test_what_to_do_about_a_dead_process_is_told() -> None:
    said = "Failed to process the request(s) for model 'm_0', message: Stub process 'm_0' is not healthy."
    assert str(from_grpc(said, "StatusCode.INTERNAL")) == (
        f"[StatusCode.INTERNAL] {said} The model's process has died; the server's log or the kernel's log has the "
        "cause. Load the model again, or restart the server"
    )
    restarted = "Stub process 'm_0' is unhealthy and it will be restarted."
    assert str(from_grpc(restarted, "StatusCode.INTERNAL")) == f"[StatusCode.INTERNAL] {restarted}"


@pytest.mark.parametrize(
    "message",
    [
        "Request for unknown model: 'resize' has no available versions",
        "Request for unknown model: 'lossless' has no available versions",
        "inference request for sequence 7 to model 'rnn' is not available: Server is stopping",
    ],
)
def test_a_model_that_is_unavailable_is_an_answer_and_no_missing_server(message: str) -> None:
    error = from_grpc(message)
    assert type(error) is InferenceError
    assert message in str(error)


FAILED = "failed to connect to all addresses; last error: "

NO_SERVER: dict[tuple[Callable[[str], ShmError], type[ShmError], str], list[str]] = {
    (from_grpc, ServerUnavailableError, f"no Triton server answers at {ADDRESS}; is it running"): [
        f"{FAILED}UNKNOWN: ipv4:127.0.0.1:8001: Failed to connect to remote host: connect: Connection refused (111)"
    ],
    (from_grpc, ServerUnavailableError, f"no Triton server answers at {ADDRESS} as it should; is this its port for"): [
        f"{FAILED}UNAVAILABLE: ipv4:10.0.0.1:8001: Connection timed out",
        f"{FAILED}UNKNOWN: ipv4:127.0.0.1:8000: Socket closed",
        f"{FAILED}UNKNOWN: ipv4:127.0.0.1:8000: recvmsg:Connection reset by peer",
    ],
    (from_grpc, ServerUnavailableError, f"the server at {ADDRESS} speaks HTTP, and not gRPC; check the port. Triton"): [
        f"{FAILED}UNKNOWN: ipv4:127.0.0.1:8000: Trying to connect an http1.x server",
        f"{FAILED}UNAVAILABLE: ipv4:127.0.0.1:8000: Failed parsing HTTP/2 (Expected SETTINGS frame as the first frame)",
    ],
    (from_http, ServerUnavailableError, "(Connection refused)"): ["Connection refused"],
    (from_grpc, ServerUnavailableError, "By default gRPC is on 8001 and HTTP on 8000"): [f"{FAILED}Connection refused"],
    (from_http, ServerUnavailableError, "no Triton server answers at http://localhost:8000"): [
        "ConnectionRefusedError: [Errno 111] Connection refused",
        "No route to host",
        "Network is unreachable",
    ],
    (from_grpc, client_errors.UnknownHostError, "this machine cannot resolve the host name in"): [
        "DNS resolution failed for nowhere:8001: C-ares status is not ARES_SUCCESS: Domain name not found",
        "DNS resolution failed for tls.nowhere:8001: UNKNOWN: Name or service not known",
        "errors resolving nowhere:8001: [field:hostname lookup error:address lookup failed: Domain name not found]",
    ],
    (from_http, client_errors.UnknownHostError, "this machine cannot resolve the host name in"): [
        "Name or service not known",
        "Temporary failure in name resolution",
        "No address associated with hostname",
    ],
    (from_grpc, client_errors.ConnectionLostError, "broke before the answer came; the model may have run"): [
        "Socket closed",
        "recvmsg:Connection reset by peer",
        "GOAWAY received",
        "Broken pipe",
    ],
    (from_http, client_errors.ConnectionLostError, "broke before the answer came; the model may have run"): [
        "Connection reset by peer",
        "Broken pipe",
    ],
    (from_grpc, client_errors.TlsError, "use grpcs:// or https:// only where the server speaks TLS"): [
        f"{FAILED}UNKNOWN: Ssl handshake failed (TSI_PROTOCOL_FAILURE): SSL_ERROR_SSL: OPENSSL: WRONG_VERSION_NUMBER",
        f"{FAILED}UNKNOWN: Ssl handshake failed: SSL_ERROR_SSL: OPENSSL_internal:CERTIFICATE_VERIFY_FAILED",
    ],
    (from_http, client_errors.TlsError, "use grpcs:// or https:// only where the server speaks TLS"): [
        "[SSL: WRONG_VERSION_NUMBER] wrong version number (_ssl.c:1006)",
        "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: self-signed certificate (_ssl.c:1006)",
    ],
}


@pytest.mark.parametrize(
    ("make", "kind", "told", "message"),
    [(*told, message) for told, messages in NO_SERVER.items() for message in messages],
)
def test_why_there_is_no_server(make: Callable[[str], ShmError], kind: type[ShmError], told: str, message: str) -> None:
    error = make(message)
    assert type(error) is kind
    assert told in str(error)


@pytest.mark.parametrize("name", ["grpc_proxy", "https_proxy", "http_proxy"])
def test_a_proxy_is_named_if_there_is_no_connection(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for each in ("grpc_proxy", "https_proxy", "http_proxy", "no_grpc_proxy", "no_proxy"):
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv(name, "http://me:secret@proxy:3128")
    told = f"; gRPC uses the proxy in the environment variable {name}; to connect without it, set no_proxy=localhost"
    for error in (unavailable(ADDRESS, "Connection refused"), translated("StatusCode.DEADLINE_EXCEEDED", "", ADDRESS)):
        assert str(error).endswith(told)
    assert str(unavailable("http://localhost:8000", "nothing")).endswith(f"ignores the environment variable {name}")
    monkeypatch.setenv("no_proxy", "example.org, localhost")
    assert "proxy" not in str(unavailable(ADDRESS, "Connection refused"))
