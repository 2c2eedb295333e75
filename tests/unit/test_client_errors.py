"""What users of a client are told when something goes wrong between it and its server."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest
from tritonclient.utils import InferenceServerException

from shm_backend_utils.client import errors
from shm_backend_utils.client.errors import (
    BudgetError,
    ConnectionLostError,
    DeadlineExceededError,
    ForkedError,
    InferenceError,
    InputMissingError,
    MemoryRefusedError,
    OutputRoomError,
    PathUnavailableError,
    PoolExhaustedError,
    ServerUnavailableError,
    TimeoutValueError,
    TlsError,
    UnknownHostError,
    deadline_exceeded,
    translated,
    unavailable,
)
from shm_backend_utils.errors import (
    CallerError,
    ClosedError,
    MachineError,
    MissingTensorError,
    PeerError,
    ShmError,
)

ADDRESS = "grpc://localhost:8001"
UNAVAILABLE = "StatusCode.UNAVAILABLE"


def from_grpc(message: str, status: str | None = UNAVAILABLE) -> ShmError:
    return translated(status, message, ADDRESS)


def from_http(message: str) -> ShmError:
    return unavailable("http://localhost:8000", message)


EXAMPLES: dict[str, ShmError] = {
    "BudgetError": BudgetError("too much"),
    "ConnectionLostError": ConnectionLostError("it broke", UNAVAILABLE),
    "DeadlineExceededError": deadline_exceeded(),
    "ForkedError": ForkedError("this client"),
    "InferenceError": InferenceError("refused", "StatusCode.INVALID_ARGUMENT"),
    "InputMissingError": InputMissingError("no 'X'", None, "X"),
    "MemoryRefusedError": MemoryRefusedError("cannot be opened", "StatusCode.NOT_FOUND"),
    "OutputRoomError": OutputRoomError("too small"),
    "PathUnavailableError": PathUnavailableError("closed"),
    "PoolExhaustedError": PoolExhaustedError("dry"),
    "ServerUnavailableError": ServerUnavailableError("nobody", UNAVAILABLE),
    "TimeoutValueError": TimeoutValueError("0"),
    "TlsError": TlsError("no TLS", UNAVAILABLE),
    "UnknownHostError": UnknownHostError("no such host", UNAVAILABLE),
}
every_error = pytest.mark.parametrize("error", EXAMPLES.values(), ids=list(EXAMPLES))


def test_there_is_an_example_of_every_error() -> None:
    assert set(EXAMPLES) == {name for name in errors.__all__ if name.endswith("Error")}
    assert all(type(error).__name__ == name for name, error in EXAMPLES.items())


@every_error
def test_an_error_survives_pickling(error: ShmError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert (str(again), again.args, vars(again)) == (str(error), error.args, vars(error))


@every_error
def test_an_error_reads_as_a_sentence_and_not_as_a_tuple(error: ShmError) -> None:
    assert str(error)
    assert not str(error).startswith("(")


@every_error
def test_the_programmers_form_of_an_error_has_its_message_too(error: ShmError) -> None:
    words = str(error).rpartition("] ")[2]  # after the status, where there is one
    assert words in repr(error)


@pytest.mark.parametrize(
    ("kind", "others"),
    [
        (BudgetError, [CallerError, ValueError]),
        (ConnectionLostError, [ServerUnavailableError]),
        (DeadlineExceededError, [InferenceError, TimeoutError]),
        (ForkedError, [ClosedError, RuntimeError]),
        (InferenceError, [InferenceServerException, PeerError]),
        (InputMissingError, [InferenceError, MissingTensorError, ValueError]),
        (MemoryRefusedError, [InferenceError]),
        (OutputRoomError, [InferenceError, ValueError]),
        (PathUnavailableError, [CallerError]),
        (PoolExhaustedError, [MachineError, TimeoutError]),
        (ServerUnavailableError, [InferenceServerException, MachineError, ConnectionError]),
        (TimeoutValueError, [CallerError, ValueError]),
        (TlsError, [ServerUnavailableError]),
        (UnknownHostError, [ServerUnavailableError]),
    ],
)
def test_an_error_is_caught_by_who_knows_only_python_or_tritonclient(
    kind: type[ShmError], others: list[type[Exception]]
) -> None:
    with pytest.raises(tuple(others)) as caught:
        raise EXAMPLES[kind.__name__]
    assert all(isinstance(caught.value, other) for other in others)


def test_an_answer_with_an_error_keeps_its_status_and_message() -> None:
    error = from_grpc("[request id: 7] expected 3 dimensions", "StatusCode.INVALID_ARGUMENT")
    assert type(error) is InferenceError
    assert isinstance(error, InferenceError)
    assert (error.status(), error.message()) == ("StatusCode.INVALID_ARGUMENT", "[request id: 7] expected 3 dimensions")


def test_what_to_do_about_a_dead_process_is_told() -> None:
    said = "Failed to process the request(s) for model 'm_0', message: Stub process 'm_0' is not healthy."
    error = translated("StatusCode.INTERNAL", said, "grpc://h:1")
    assert str(error) == (
        f"[StatusCode.INTERNAL] {said} The model's process has died: the server's log, or the kernel's, tells of what. "
        "Load the model again, or start the server anew"
    )
    restarted = "Stub process 'm_0' is unhealthy and it will be restarted."
    assert str(translated("StatusCode.INTERNAL", restarted, "grpc://h:1")) == f"[StatusCode.INTERNAL] {restarted}"


def test_an_answer_without_a_reason_says_so() -> None:
    assert "the server gave no reason" in str(from_grpc("", "500"))


def test_no_answer_in_time_is_a_timeout() -> None:
    error = from_grpc("Deadline Exceeded", "StatusCode.DEADLINE_EXCEEDED")
    assert type(error) is DeadlineExceededError
    assert "did not answer before the deadline" in str(error)


def test_an_input_that_the_model_misses_is_named() -> None:
    error = from_grpc(
        "shm:missing: the request has no input 'IMAGE', which the model needs", "StatusCode.INVALID_ARGUMENT"
    )
    assert isinstance(error, InputMissingError)
    assert error.tensor == "IMAGE"


def test_grpc_finds_no_server() -> None:
    error = from_grpc(
        "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:8001: Failed to connect to remote "
        "host: connect: Connection refused (111)"
    )
    assert type(error) is ServerUnavailableError
    assert f"no Triton server answers at {ADDRESS}; is it running" in str(error)
    assert "By default gRPC is on 8001 and HTTP on 8000" in str(error)


@pytest.mark.parametrize(
    "last_error",
    [
        "UNAVAILABLE: ipv4:10.0.0.1:8001: Connection timed out",
        "UNKNOWN: ipv4:127.0.0.1:8000: Socket closed",
        "UNKNOWN: ipv4:127.0.0.1:8000: recvmsg:Connection reset by peer",
    ],
)
def test_grpc_finds_something_else_and_no_request_was_on_its_way(last_error: str) -> None:
    error = from_grpc(f"failed to connect to all addresses; last error: {last_error}")
    assert type(error) is ServerUnavailableError
    assert f"no Triton server answers at {ADDRESS} as it should; is this its port for this protocol" in str(error)


@pytest.mark.parametrize(
    "last_error",
    [
        "UNKNOWN: ipv4:127.0.0.1:8000: Trying to connect an http1.x server",
        "UNAVAILABLE: ipv4:127.0.0.1:8000: Failed parsing HTTP/2 (Expected SETTINGS frame as the first frame, got 79)",
    ],
)
def test_grpc_finds_http(last_error: str) -> None:
    error = from_grpc(f"failed to connect to all addresses; last error: {last_error}")
    assert type(error) is ServerUnavailableError
    assert f"what listens at {ADDRESS} speaks HTTP, and not gRPC; is this its port?" in str(error)


@pytest.mark.parametrize(
    "message",
    [
        "ConnectionRefusedError: [Errno 111] Connection refused",
        "Connection refused",
        "No route to host",
        "Network is unreachable",
        "ClientConnectorError: Cannot connect to host localhost:8000 ssl:default "
        "[Connect call failed ('127.0.0.1', 8000)]",
        "ClientConnectorError: Cannot connect to host localhost:8000 ssl:default [Connection refused]",
    ],
)
def test_http_finds_no_server(message: str) -> None:
    error = from_http(message)
    assert type(error) is ServerUnavailableError
    assert "no Triton server answers at http://localhost:8000" in str(error)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (from_grpc, "DNS resolution failed for nowhere:8001: C-ares status is not ARES_SUCCESS: Domain name not found"),
        (from_grpc, "DNS resolution failed for tls.nowhere:8001: UNKNOWN: Name or service not known"),
        (
            from_grpc,
            "errors resolving nowhere:8001: [field:hostname lookup error:address lookup failed for nowhere:8001: "
            "Domain name not found]",
        ),
        (from_http, "Name or service not known"),
        (from_http, "Temporary failure in name resolution"),
        (from_http, "No address associated with hostname"),
        (from_http, "gaierror: [Errno -2] Name or service not known"),
        (
            from_http,
            "ClientConnectorDNSError: Cannot connect to host nowhere:8000 ssl:default [Name or service not known]",
        ),
    ],
)
def test_a_host_that_nobody_knows(make: Callable[[str], ShmError], message: str) -> None:
    error = make(message)
    assert type(error) is UnknownHostError
    assert "is not known to this machine; is its name right?" in str(error)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (from_grpc, "Socket closed"),
        (from_grpc, "recvmsg:Connection reset by peer"),
        (from_grpc, "GOAWAY received"),
        (from_grpc, "Broken pipe"),
        (from_http, "Connection reset by peer"),
        (from_http, "Broken pipe"),
        (from_http, "HTTPConnectionClosed: connection closed."),
        (from_http, "ServerDisconnectedError: Server disconnected"),
        (from_http, "ClientOSError: [Errno 104] Connection reset by peer"),
    ],
)
def test_a_connection_that_broke(make: Callable[[str], ShmError], message: str) -> None:
    error = make(message)
    assert type(error) is ConnectionLostError
    assert "broke before the answer came; the model may have run" in str(error)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            from_grpc,
            "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:8001: Ssl handshake failed "
            "(TSI_PROTOCOL_FAILURE): SSL_ERROR_SSL: error:100000f7:SSL routines:OPENSSL_internal:WRONG_VERSION_NUMBER",
        ),
        (
            from_grpc,
            "failed to connect to all addresses; last error: UNKNOWN: Ssl handshake failed: SSL_ERROR_SSL: "
            "error:1000007d:SSL routines:OPENSSL_internal:CERTIFICATE_VERIFY_FAILED",
        ),
        (from_http, "[SSL: WRONG_VERSION_NUMBER] wrong version number (_ssl.c:1006)"),
        (
            from_http,
            "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: self-signed certificate (_ssl.c:1006)",
        ),
        (
            from_http,
            "ClientConnectorSSLError: Cannot connect to host localhost:8000 ssl:default [[SSL: WRONG_VERSION_NUMBER] "
            "wrong version number (_ssl.c:1006)]",
        ),
        (
            from_http,
            "ClientConnectorCertificateError: Cannot connect to host localhost:8000 ssl:True "
            "[SSLCertVerificationError: (1, '[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed')]",
        ),
    ],
)
def test_sides_that_do_not_agree_on_tls(make: Callable[[str], ShmError], message: str) -> None:
    error = make(message)
    assert type(error) is TlsError
    assert "use grpcs:// or https:// only where the server speaks TLS" in str(error)


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


def test_the_reason_is_kept_word_for_word() -> None:
    assert "(Connection refused)" in str(from_http("Connection refused"))
