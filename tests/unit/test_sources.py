"""What a client and a call may be told: inputs of any kind, the server's URL, options; and what is refused."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from shm_backend_utils.client.errors import TimeoutValueError
from shm_backend_utils.client.inputs.sources import Source, sources
from shm_backend_utils.client.options import RequestOptions, Tls, check_options, check_timeout
from shm_backend_utils.client.settings import ClientSettings
from shm_backend_utils.client.transports.grpc.codec import GrpcCodec
from shm_backend_utils.client.transports.http.codec import HttpCodec, HttpMessage
from shm_backend_utils.client.transports.messages import Codec, split_url
from shm_backend_utils.errors import CallerError, TensorError, TensorNameError, TensorShapeError, TensorTypeError
from shm_backend_utils.gpu.arrays.imported import imported, is_on_gpu
from shm_backend_utils.model_spec import ModelSpec
from shm_backend_utils.tensors.values import untyped_array
from tests.unit.fake_server import FakeServer, config
from tests.unit.fake_wires import client_of

Array = npt.NDArray[Any]


def source(value: Any, config_dtype: str = "TYPE_FP32", dims: Sequence[int] = (-1,), max_batch_size: int = 0) -> Source:
    tensor = {"name": "X", "data_type": config_dtype, "dims": dims}
    described = {"name": "model", "input": [tensor], "max_batch_size": max_batch_size}
    return sources(ModelSpec.from_config(described), {"X": value})["X"]


def written(source: Source) -> Array:
    target: Array = np.full(source.shape, 77).astype(source.dtype.numpy)
    source.write_to(target)
    return target


def same(found: Array, expected: Array) -> bool:
    return found.dtype == expected.dtype and found.shape == expected.shape and bool((found == expected).all())


class Producer:
    """An array of another library: all that one can do is take it over by DLPack."""

    def __init__(self, array: Array, device: tuple[int, int] = (1, 0)) -> None:
        self._array = array
        self._device = device

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device

    def __dlpack__(self, **wanted: Any) -> Any:
        return self._array.__dlpack__(**{name: value for name, value in wanted.items() if value is not None})


def interface_of(array: Array) -> Any:
    return SimpleNamespace(owner=array, __array_interface__=array.__array_interface__)


class Unwilling(Producer):
    """Something that has DLPack's methods, and refuses; as PyTorch's tensors do that are part of a computation."""

    def __dlpack__(self, **wanted: Any) -> Any:
        raise BufferError("part of a computation")


VALUES = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.mark.parametrize(
    "kind",
    [np.asarray, Producer, lambda array: Producer(array, (3, 0)), interface_of, list],  # 3: kDLCUDAHost
)
def test_an_array_is_copied_only_once_and_not_before_it_is_written(kind: Any) -> None:
    array = VALUES.copy()
    made = source(kind(array), dims=(-1, 3))
    array[:] = -1
    assert (written(made) == -1).all()


def test_a_producer_in_a_devices_memory_is_refused() -> None:
    for device in (2, 4, 7, 10, 13):
        with pytest.raises(TensorError, match=f"'X' lies on DLPack device type {device}; .* copy it there") as caught:
            source(Producer(VALUES, (device, 0)))
        assert caught.value.tensor == "X"
    with pytest.raises(TensorError, match="'X' is a .*Unwilling that cannot be read: part of a computation"):
        source(Unwilling(VALUES))


class Negated(Producer):
    """A tensor of torch whose memory has the wrong sign."""

    def is_neg(self) -> bool:
        return True

    def resolve_neg(self) -> Any:
        raise AssertionError("a copy that nobody asked for")


class Zeros(Producer):
    """A tensor of torch that is zero without any memory."""

    def _is_zerotensor(self) -> bool:
        return True


@pytest.mark.parametrize("device", [(1, 0), (2, 0)])
@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (Negated, r"lies in memory with the wrong sign .* give value.resolve_neg\(\)"),
        (Zeros, r"has zeros without memory .* give value.clone\(\)"),
    ],
)
def test_a_tensor_that_its_memory_does_not_hold_is_refused(device: tuple[int, int], kind: Any, text: str) -> None:
    def take(name: str, value: Any, found: Mapping[str, Source]) -> Any:
        runtime: Any = None  # which is not asked
        return imported(runtime, value, 0, tensor=name) if is_on_gpu(value) else None

    spec = ModelSpec.from_config({"name": "model", "input": [{"name": "X", "data_type": "TYPE_FP32", "dims": [-1]}]})
    with pytest.raises(TensorTypeError, match=f"'X' {text}"):
        sources(spec, {"X": kind(VALUES, device)}, take)


@pytest.mark.parametrize("value", [[1, 2**63], [2**53 + 1, 2**63], [2**64], [0.5, 2**53 + 1], [np.int64(-1), 2**63]])
def test_integers_that_become_fractions_are_refused(value: list[Any]) -> None:
    with pytest.raises(TensorTypeError, match="'X' holds integers that no dtype can hold .* give an array"):
        untyped_array("X", value)


@pytest.mark.parametrize("value", [[], [1, 0.5], [True, 2], [2**63], [-1]])
def test_numbers_of_no_given_dtype_are_as_numpy_takes_them(value: list[Any]) -> None:
    assert same(untyped_array("X", value), np.asarray(value))


def test_a_list_of_two_images_for_a_model_without_batches_is_not_one_image_twice_as_high() -> None:
    image = np.zeros((2, 4, 3), np.float32)
    told = "is a list of 2 arrays of 3 dimensions, but model 'model' takes one of them at a time; call it once for each"
    with pytest.raises(TensorShapeError, match=f"tensor 'X' {told}, or join them, by np.concatenate for example"):
        source([image, image], dims=(-1, -1, 3))
    assert same(written(source([image], dims=(-1, -1, 3))), image)


@pytest.mark.parametrize(
    ("value", "config_dtype"),
    [
        ([-1], "TYPE_UINT64"),
        ([2**24 + 1], "TYPE_FP32"),
        ([2**53 + 1], "TYPE_FP64"),
        ([0.5], "TYPE_INT32"),
        ([float("nan")], "TYPE_INT32"),
        ([float("inf")], "TYPE_INT64"),
        ([1], "TYPE_BOOL"),
        ([0.0], "TYPE_BOOL"),
        ([True], "TYPE_FP32"),
        ([True], "TYPE_UINT8"),
        ([1j], "TYPE_FP32"),
        *(([10**400], f"TYPE_{name}") for name in ("INT32", "UINT64", "FP16", "BF16", "FP64")),
        *((value, "TYPE_BOOL") for value in (None, {1}, {"x": 1}, [None], [object()])),
        *(([None], f"TYPE_{name}") for name in ("FP32", "INT8", "STRING", "BF16")),
        *((value, "TYPE_FP32") for value in ("word", ["word"], [b"word"], ["1.5"])),
        *((["word"], f"TYPE_{name}") for name in ("INT64", "BOOL", "BF16")),
    ],
)
def test_pythons_numbers_that_the_models_dtype_does_not_hold_are_refused(value: list[Any], config_dtype: str) -> None:
    with pytest.raises(TensorTypeError, match=f"'X' holds .*, which {config_dtype} cannot hold") as caught:
        source(value, config_dtype)
    assert caught.value.tensor == "X"


@pytest.mark.parametrize("value", [[1.0], 1.0, ["word"], [VALUES], Producer(VALUES)], ids=type)
def test_what_has_to_be_read_for_an_input_that_the_model_does_not_have_is_refused(value: Any) -> None:
    spec = ModelSpec.from_config({"name": "model", "input": [{"name": "X", "data_type": "TYPE_FP32", "dims": [1]}]})
    with pytest.raises(TensorNameError, match="model 'model' has no input 'Y'; it has X"):
        sources(spec, {"Y": value})


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
    with FakeServer(config("m", sequence_batching=batching)) as server, client_of(server) as client:
        client.infer("m", {"IN0": VALUES[0]}, sequence_id=taken)
        with pytest.raises(CallerError, match=f"sequence_id is {refused!r}, but a control_input of model 'm'"):
            client.infer("m", {"IN0": VALUES[0]}, sequence_id=refused)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("model_version", 1, "a str that UTF-8 can encode, such as '1'"),
        ("request_id", b"7", "a str"),
        ("priority", "high", "an integer"),
        ("queue_timeout_us", 1.5, "an integer: microseconds"),
        ("priority", -1, f"0 or more, and less than {2**64}"),
        ("sequence_id", -5, f"0 or more, and less than {2**64}"),
        ("queue_timeout_us", 2**63, f"0 or more, and less than {2**63}"),
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


OF_NUMPY: Any = {
    "request_id": np.str_("x"),
    "sequence_id": np.int64(7),
    "sequence_start": np.bool_(True),
    "priority": np.uint8(1),
    "queue_timeout_us": np.int64(9),
    "headers": {np.str_("x"): np.str_("y")},
    "parameters": {np.str_("n"): np.float64(0.5)},
    "model_version": np.str_("1"),
    "sequence_end": np.bool_(False),
    "compression": "deflate",
}
PLAIN: Any = dict(zip(OF_NUMPY, ("x", 7, True, 1, 9, {"x": "y"}, {"n": 0.5}, "1", False, "deflate"), strict=True))


@pytest.mark.parametrize("codec", [GrpcCodec(), HttpCodec()])
def test_values_of_numpy_are_sent_like_pythons(codec: Codec) -> None:
    sent = [
        codec.infer(name("m"), check_options(options), outputs={name("Y"): None})
        for name, options in ((np.str_, OF_NUMPY), (str, PLAIN))
    ]
    assert sent[0] == sent[1]
    assert {*OF_NUMPY} == {*RequestOptions.__annotations__}


@pytest.mark.parametrize("options", [{}, {**PLAIN, "compression": None}, PLAIN], ids=["none", "some", "compressed"])
@pytest.mark.parametrize("codec", [GrpcCodec(), HttpCodec()])
def test_the_messages_of_one_slot_differ_only_in_the_generation(codec: Codec, options: Any) -> None:
    checked = check_options(options)
    message_of = codec.for_slot("m", "address", ["Y"], 2, checked)
    for generation in (1, 7, 10**18):
        slot = "address", generation
        whole = codec.infer("m", checked, outputs={"Y": None}, batch_size=2, slot=slot)
        assert content_of(message_of(generation)) == content_of(whole)


def content_of(message: Any) -> Any:
    if not isinstance(message, HttpMessage) or message.headers.get("Content-Encoding"):
        return message
    body, headers = b"".join(message.body or ()), dict(message.headers)
    assert int(headers.pop("Inference-Header-Content-Length")) == len(body)
    return message._replace(body=json.loads(body), headers=headers)


def test_a_plugin_completes_each_message_of_a_slot() -> None:
    numbers = itertools.count()
    codec = GrpcCodec(lambda metadata: [("number", str(next(numbers)))])
    message_of = codec.for_slot("m", "address", None, None, {})
    assert [message_of(generation).metadata for generation in (1, 2)] == [[("number", "0")], [("number", "1")]]


def test_a_parameter_that_no_request_can_carry_or_that_the_client_writes_itself_is_refused() -> None:
    wrong: Any
    for wrong in (None, [1], {"a": 1}, b"bytes", "\ud800"):
        with pytest.raises(CallerError, match="parameter 'mine' is .*; expected a str, a bool, an int of 64 bits"):
            check_options(RequestOptions(parameters={"mine": wrong}))
    for name in ("shm_slot", "shm_generation", "shm_io"):
        with pytest.raises(CallerError, match=f"the client sets parameter '{name}' itself; leave it out"):
            check_options(RequestOptions(parameters={name: "mine"}))
    with pytest.raises(CallerError, match="parameter 'x' is nan, which JSON cannot express; send it as a str"):
        HttpCodec().infer("m", check_options(RequestOptions(parameters={"x": math.nan})))


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
        ("HTTP://127.0.0.1:8000", ("http", False, "127.0.0.1:8000", "127.0.0.1")),
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
    with pytest.raises(CallerError, match="does not name a server; expected HOST:PORT or grpc://HOST:PORT for gRPC"):
        split_url(url)


NO_PORT = "has no valid port; expected 1 to 65535, and brackets around an IPv6 address"


@pytest.mark.parametrize(
    ("url", "refusal"),
    [
        ("localhost", "names no port; Triton's gRPC is on 8001 by default: 'localhost:8001'"),
        *((url, NO_PORT) for url in ("localhost:180010", "localhost:abc", "http://[::1]:0", "grpcs://fe80::1:8001")),
        ("localhost:8000/v2", "has a path, but gRPC has none; expected HOST:PORT, or http://HOST:PORT for HTTP"),
        ("grpcs://localhost:1/x", "has a path, but gRPC has none; expected HOST:PORT, or http://HOST:PORT for HTTP"),
    ],
)
def test_a_port_must_be_valid_and_grpc_has_no_path_and_without_tls_needs_a_port(url: str, refusal: str) -> None:
    with pytest.raises(CallerError) as error:
        split_url(url)
    assert str(error.value) == f"URL {url!r} {refusal}"


def test_certificates_for_a_url_without_tls_are_refused() -> None:
    for url in ("localhost:8001", "grpc://localhost:8001", "http://localhost:8000"):
        with pytest.raises(CallerError, match="does not use TLS; write grpcs:// or https://"):
            ClientSettings(url, 1.0, "auto", Tls())
