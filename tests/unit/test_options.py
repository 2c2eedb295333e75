"""What a client and a call may be told beside tensors: the server's URL, options and times; and what is refused."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.client.errors import TimeoutValueError
from shm_backend_utils.client.options import RequestOptions, Tls, check_options, check_timeout
from shm_backend_utils.client.paths.call import check_sequence_id
from shm_backend_utils.client.settings import ClientSettings
from shm_backend_utils.client.transports.grpc.codec import GrpcCodec
from shm_backend_utils.client.transports.http.codec import HttpCodec
from shm_backend_utils.client.transports.messages import Codec, split_url
from shm_backend_utils.errors import CallerError
from shm_backend_utils.model_spec import ModelSpec

EVERYTHING = RequestOptions(
    model_version="2",
    request_id="7",
    sequence_id=3,
    sequence_start=True,
    sequence_end=False,
    priority=1,
    timeout=1000,
    headers={"authorization": "me"},
    compression="gzip",
    parameters={"times": 3},
)


def test_every_option_is_taken() -> None:
    assert set(EVERYTHING) == set(RequestOptions.__annotations__)
    check_options(EVERYTHING)
    check_options(RequestOptions())
    check_options(RequestOptions(priority=np.uint8(1), timeout=np.int64(1000), compression="deflate"))


@pytest.mark.parametrize(
    ("name", "value"), [("x", "größer"), ("x", "a\nb: c"), ("x", 7), ("x y", "z"), ("", "z"), ("ü", "z"), (3, "z")]
)
def test_a_header_that_no_protocol_has_is_refused_without_its_value(name: Any, value: Any) -> None:
    check_options(RequestOptions(headers={"X-a_b.c": "of ASCII", "x-bin": b"\xff"}))  # type: ignore[dict-item]
    with pytest.raises(CallerError, match="^header .{1,5} cannot be sent; expected a str of printable ASCII"):
        check_options(RequestOptions(headers={name: value}))


@pytest.mark.parametrize(("dtype", "taken", "refused"), [("STRING", "seven", 7), ("UINT64", 7, "seven")])
def test_a_sequence_is_named_as_the_models_control_takes_it(dtype: str, taken: Any, refused: Any) -> None:
    control = {"kind": "CONTROL_SEQUENCE_CORRID", "data_type": f"TYPE_{dtype}"}
    batching = {"control_input": [{"name": "ID", "control": [control]}]}
    spec = ModelSpec.from_config({"name": "m", "sequence_batching": batching})
    check_sequence_id(spec, RequestOptions(sequence_id=taken))
    with pytest.raises(CallerError, match=f"sequence_id is {refused!r}, but a control_input of model 'm' takes it for"):
        check_sequence_id(spec, RequestOptions(sequence_id=refused))


@pytest.mark.parametrize("name", ["shm_slot", "shm_generation", "shm_io"])
def test_a_parameter_that_the_client_writes_itself_is_refused(name: str) -> None:
    with pytest.raises(CallerError, match=f"parameter '{name}' is written by the client itself; leave it out"):
        check_options(RequestOptions(parameters={name: "mine"}))


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("model_version", 1, "a str"),
        ("request_id", b"7", "a str"),
        ("priority", "high", "an integer"),
        ("timeout", 1.5, "an integer: microseconds"),
        ("priority", -1, f"0 or more, and less than {2**64}"),
        ("timeout", 2**63, f"0 or more, and less than {2**63}"),
        ("headers", [("a", "b")], "a mapping"),
        ("parameters", [("a", 1)], "a mapping"),
        ("sequence_id", 1.5, "an integer, or a str that UTF-8 can encode"),
        ("request_id", "\ud800", "a str"),
        *(("compression", wrong, "'gzip' or 'deflate'") for wrong in ("zip", "GZIP", "")),
    ],
)
def test_an_option_with_such_a_value_is_refused_before_anything_is_sent(name: str, value: Any, expected: str) -> None:
    wrong: Any = {name: value}
    with pytest.raises(CallerError, match=re.escape(f"{name} is {value!r}; expected {expected}")):
        check_options(wrong)


PLAIN = RequestOptions(
    request_id="x", sequence_id=7, sequence_start=True, priority=1, timeout=9, headers={"x": "y"}, parameters={"n": 0.5}
)
OF_NUMPY: Any = {
    "request_id": np.str_("x"),
    "sequence_id": np.int64(7),
    "sequence_start": np.bool_(True),
    "priority": np.uint8(1),
    "timeout": np.int64(9),
    "headers": {np.str_("x"): np.str_("y")},
    "parameters": {np.str_("n"): np.float64(0.5)},
}


@pytest.mark.parametrize("codec", [GrpcCodec(), HttpCodec()], ids=lambda codec: type(codec).__name__)
def test_values_of_numpy_are_sent_like_pythons(codec: Codec) -> None:
    sent = [
        codec.infer(name("m"), check_options(options), outputs={name("Y"): None})
        for name, options in ((np.str_, OF_NUMPY), (str, PLAIN))
    ]
    assert sent[0] == sent[1]


def test_a_number_that_json_lacks_is_refused_over_http() -> None:
    with pytest.raises(CallerError, match="parameter 'x' is nan, which JSON has no number for; send it as a str"):
        HttpCodec().infer("m", check_options(RequestOptions(parameters={"x": math.nan})))


@pytest.mark.parametrize("value", [None, [1], {"a": 1}, b"bytes", "\ud800"])
def test_a_parameter_that_no_request_can_carry_is_refused(value: Any) -> None:
    with pytest.raises(
        CallerError, match="parameter 'mine' is .*; expected a str, a bool, an int of 64 bits, or a float"
    ):
        check_options(RequestOptions(parameters={"mine": value}))


@pytest.mark.parametrize("timeout_s", [0, -1, -math.inf, math.inf, math.nan])
def test_no_other_time_may_be_waited(timeout_s: float) -> None:
    with pytest.raises(TimeoutValueError, match=f"timeout_s is {timeout_s}; expected a number of seconds above 0"):
        check_timeout(timeout_s)
    with pytest.raises(ValueError, match=f"patience is {timeout_s}"):
        check_timeout(timeout_s, "patience")


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("localhost:8001", ("grpc", False, "localhost:8001", "localhost")),
        ("grpc://localhost:8001", ("grpc", False, "localhost:8001", "localhost")),
        ("grpcs://host.example:8001", ("grpc", True, "host.example:8001", "host.example")),
        ("http://127.0.0.1:8000", ("http", False, "127.0.0.1:8000", "127.0.0.1")),
        ("https://host.example:443", ("http", True, "host.example:443", "host.example")),
        ("http://localhost:8000/", ("http", False, "localhost:8000", "localhost")),
        ("http://localhost:8000/triton", ("http", False, "localhost:8000/triton", "localhost")),
        ("grpcs://localhost", ("grpc", True, "localhost", "localhost")),
        ("http://host.example", ("http", False, "host.example", "host.example")),
        ("[::1]:8001", ("grpc", False, "[::1]:8001", "::1")),
        ("https://[fe80::1]:8000/x", ("http", True, "[fe80::1]:8000/x", "fe80::1")),
        ("http://[::1]", ("http", False, "[::1]", "::1")),
    ],
)
def test_a_url_is_taken_apart(url: str, expected: tuple[str, bool, str, str]) -> None:
    assert split_url(url) == expected


@pytest.mark.parametrize(
    "url",
    [
        *("", "/", "://", "grpc://", "http:///", "ftp://localhost:21", "grpcss://localhost:1", "unix:///tmp/socket"),
        *("s://x", "grpc://\udcff:1", "http://localhost:8000/\ud800", "grpc://a..b:1", f"http://{'a' * 64}:1"),
    ],
)
def test_what_is_no_url_of_a_server_is_refused_with_the_forms_that_are(url: str) -> None:
    with pytest.raises(CallerError, match="is not one of a server; expected HOST:PORT or grpc://HOST:PORT for gRPC"):
        split_url(url)


@pytest.mark.parametrize(
    ("url", "refusal"),
    [
        ("localhost", "names no port; Triton's gRPC is on 8001 by default: 'localhost:8001'"),
        ("grpc://localhost", "names no port; Triton's gRPC is on 8001 by default: 'localhost:8001'"),
        ("localhost:8000/v2", "has a path, which gRPC has not; expected HOST:PORT, or http://HOST:PORT for HTTP"),
        ("grpcs://localhost:1/x", "has a path, which gRPC has not; expected HOST:PORT, or http://HOST:PORT for HTTP"),
    ],
)
def test_grpc_has_no_path_and_without_tls_needs_a_port(url: str, refusal: str) -> None:
    with pytest.raises(CallerError) as error:
        split_url(url)
    assert str(error.value) == f"URL {url!r} {refusal}"


@pytest.mark.parametrize("url", ["localhost:8001", "grpc://localhost:8001", "http://localhost:8000"])
def test_certificates_for_a_url_without_tls_are_refused(url: str) -> None:
    with pytest.raises(CallerError, match="is without TLS; write grpcs:// or https://"):
        ClientSettings(url, 1.0, "auto", Tls())
