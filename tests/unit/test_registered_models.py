"""A client of triton-shm-client's kind: where its server is, its plugins, its rows as NumPy casts them, its outputs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt
import pytest
import tritonclient.grpc
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2
from tritonclient.grpc.auth import BasicAuth
from tritonclient.utils import InferenceServerException

from shm_backend_utils.client.transports.grpc.transport import CHANNEL_OPTIONS, GrpcAddress
from shm_backend_utils.compat.registered_model import Rows, _put, check_rows
from shm_backend_utils.compat.triton_shm_client import TritonSHMClient
from shm_backend_utils.errors import PeerError, TensorShapeError

SIZES = st.sampled_from([1, 2, 3])
SHAPES = st.lists(SIZES, max_size=3).map(tuple)
COUNTS = st.integers(1, 4)


def assigned(data: Any, row_shape: tuple[int, ...], count: int | None = None) -> npt.NDArray[Any] | None:
    """Return what NumPy makes of it, so many rows at a time, or row by row; None if it does not."""
    target = np.empty((len(data), *row_shape), np.float32)
    try:
        for begin in range(0, len(data), count or 1):
            if count:
                target[begin : begin + count] = data[begin : begin + count]
            else:
                target[begin, ...] = data[begin]
    except ValueError:
        return None
    return target


def written(data: Any, row_shape: tuple[int, ...], count: int) -> npt.NDArray[Any] | None:
    try:
        check_rows("X", data, row_shape, count)
    except TensorShapeError:
        return None
    target = np.empty((len(data), *row_shape), np.float32)
    for begin in range(0, len(data), count):
        rows = Rows("X", data[begin : begin + count], row_shape, target.dtype)
        assert rows.shape == target[begin : begin + count].shape
        rows.write_to(target[begin : begin + count])
    return target


def assert_same(one: npt.NDArray[Any] | None, other: npt.NDArray[Any] | None) -> None:
    assert np.array_equal(one, other) if one is not None and other is not None else one is other


@given(length=st.integers(1, 9), shape=SHAPES, row_shape=SHAPES, count=COUNTS)
def test_an_array_as_in_numpy(length: int, shape: tuple[int, ...], row_shape: tuple[int, ...], count: int) -> None:
    data = np.random.default_rng(0).integers(0, 100, (length, *shape))
    assert_same(written(data, row_shape, count), assigned(data, row_shape, count))


@given(shapes=st.lists(SHAPES, min_size=1, max_size=4), row_shape=SHAPES, count=COUNTS)
def test_a_list_of_arrays_as_in_numpy(shapes: list[tuple[int, ...]], row_shape: tuple[int, ...], count: int) -> None:
    data = [np.random.default_rng(index).random(shape) for index, shape in enumerate(shapes)]
    assert_same(written(data, row_shape, count), assigned(data, row_shape))


OF_OTHER_TYPES = [np.array([0, 1]).astype(kind) for kind in ("i1", "u8", "?", ">f4", object, "U4")]


@pytest.mark.parametrize("row", [7, 7.5, True, "7.5", np.float16(7), [7], [[7, 8]], (7, 8), *OF_OTHER_TYPES], ids=repr)
def test_rows_of_any_type_are_taken_if_numpy_takes_each(row: Any) -> None:
    assert_same(written([row] * 3, (2,), 2), assigned([row] * 3, (2,)))


FLOATS = np.arange(6, dtype=np.float32).reshape(2, 3)


def put(array: npt.NDArray[Any], shape: tuple[int, ...], dtype: Any = np.float32) -> npt.NDArray[Any]:
    target = np.full(shape, 7, dtype)
    _put("Y", array, target)
    return target


@pytest.mark.parametrize(
    ("array", "shape", "dtype", "expected"),
    [
        (FLOATS, (2, 3), np.float32, FLOATS),
        (FLOATS, (6,), np.float32, FLOATS.reshape(6)),
        (FLOATS.T, (6,), np.float32, FLOATS.T.reshape(6)),
        (FLOATS, (2, 3), np.int32, FLOATS.view(np.int32)),
        (FLOATS, (2, 4), np.float32, [[0, 1, 2, 0], [3, 4, 5, 0]]),
        (FLOATS, (3, 3), np.float32, [[0, 1, 2], [3, 4, 5], [0, 0, 0]]),
        (np.array([1, 2], np.uint8), (4,), np.uint16, [0x0201, 0, 0, 0]),
        (np.array([b"ab", b""], object), (12,), np.uint8, [*b"\2\0\0\0ab\0\0\0\0\0\0"]),
    ],
)
def test_outputs_go_where_they_were_declared(array: Any, shape: tuple[int, ...], dtype: Any, expected: Any) -> None:
    assert np.array_equal(put(array, shape, dtype), expected)
    with pytest.raises(PeerError, match=r"output 'Y' is .* of shape .*, but was registered as .*, which"):
        put(array, (1,), np.uint8)


CHANNELS = SimpleNamespace(  # in place of ``grpc``, it tells which channel was asked for
    insecure_channel=lambda target, options: ("insecure", target, None),
    secure_channel=lambda target, credentials, options: ("secure", target, credentials),
)


def address_of(url: str = "127.0.0.1:1", **named: Any) -> GrpcAddress:
    with TritonSHMClient(url, **named) as client:
        address: GrpcAddress = client._grpc_address
    return address


@pytest.mark.parametrize(
    ("target", "host"),
    [
        ("localhost:8001", "localhost"),
        ("localhost", "localhost"),
        ("[::1]:8001", "::1"),
        ("dns:///triton.example:8001", "triton.example"),
        ("dns://192.0.2.7/triton.example:8001", "triton.example"),
        ("ipv6:[2001:db8::1]:8001", "2001:db8::1"),
        ("unix:/run/triton.socket", "localhost"),
        ("unix-abstract:triton", "localhost"),
        ("unix-server.example:8001", "unix-server.example"),
    ],
)
def test_the_host_in_what_grpc_takes(target: str, host: str) -> None:
    address = address_of(target)
    assert (address.target, address.host) == (target, host)


def test_credentials_make_the_channel_secure_and_come_before_ssl_which_alone_reads_files(tmp_path: Path) -> None:
    assert address_of().channel(CHANNELS) == ("insecure", "127.0.0.1:1", None)
    credentials = grpc.ssl_channel_credentials()
    assert address_of(creds=credentials).channel(CHANNELS) == ("secure", "127.0.0.1:1", credentials)
    assert address_of(ssl=True, creds=credentials).credentials is credentials
    files = {name: tmp_path / name for name in ("root_certificates", "private_key", "certificate_chain")}
    for file in files.values():
        file.write_bytes(b"")
    address = address_of(ssl=True, **{name: str(file) for name, file in files.items()})
    assert isinstance(address.credentials, grpc.ChannelCredentials)
    assert str(address) == "grpcs://127.0.0.1:1"
    assert address_of(root_certificates="/nowhere").credentials is None


def test_messages_may_have_any_size_and_connections_are_kept_as_tritonclient_keeps_them() -> None:
    names = ["keepalive_time_ms", "keepalive_timeout_ms", "keepalive_permit_without_calls"]
    names.append("http2.max_pings_without_data")
    usual, keepalive = tritonclient.grpc.KeepAliveOptions(), tritonclient.grpc.KeepAliveOptions(1000, 2000, True, 3)
    options = dict(address_of().options)
    assert options.items() >= dict(CHANNEL_OPTIONS).items()
    assert [options[f"grpc.{name}"] for name in names[:2]] == [usual.keepalive_time_ms, usual.keepalive_timeout_ms]
    options = dict(address_of(keepalive_options=keepalive).options)
    assert [options[f"grpc.{name}"] for name in names] == [1000, 2000, True, 3]
    given = [("grpc.max_send_message_length", 1000)]  # which then are all
    assert list(address_of(channel_args=given, keepalive_options=keepalive).options) == given


OF_FLOATS: list[Any] = [("X", (4,), np.float32)]


class Gatekeeper(grpc.GenericRpcHandler):  # type: ignore[misc]
    """A server that knows no model, and says so to one user alone."""

    def service(self, details: Any) -> Any:
        is_known = dict(details.invocation_metadata).get("authorization") == "Basic bWU6c2VjcmV0"
        refusal = (grpc.StatusCode.NOT_FOUND, "unknown model") if is_known else (grpc.StatusCode.UNAUTHENTICATED, "no")
        return grpc.unary_unary_rpc_method_handler(
            lambda request, context: context.abort(*refusal), service_pb2.ModelConfigRequest.FromString
        )


def test_a_plugin_completes_questions_too_and_who_is_told_nothing_of_a_model_registers_none() -> None:
    server = grpc.server(ThreadPoolExecutor(2), handlers=[Gatekeeper()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with TritonSHMClient(f"127.0.0.1:{port}") as client:
        with pytest.raises(InferenceServerException, match="UNAUTHENTICATED"):
            client.register_shm_model("unknown", OF_FLOATS, OF_FLOATS, 1, 1)
        assert client.registered_models == {}
        client.register_plugin(BasicAuth("me", "secret"))
        client.register_shm_model("unknown", OF_FLOATS, OF_FLOATS, 1, 1)
        with pytest.raises(InferenceServerException, match="unknown model"):
            client.infer_shm("unknown", {"X": np.zeros((1, 4))})
    server.stop(None).wait()
