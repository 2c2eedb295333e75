"""What ``shm_util`` takes, and what it says of the rest."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http

from shm_backend_utils.compat.shm_util import (
    SystemShmHandle,
    cleanup_shm_regions,
    create_set_shm_regions,
    unregister_cleanup_shm_regions,
)
from shm_backend_utils.errors import ClosedError, TensorError, TensorTypeError
from shm_backend_utils.memory.segment import SystemSegment
from shm_backend_utils.testing.fake_cuda.driver import FakeDriver

X: Final = np.arange(1, 6, dtype=np.float32)
ONE_INPUT: Final[Any] = [("X", X)]
ONE_OUTPUT: Final[Any] = [("Y", 20)]
NAMES: Final = ["x", "y"]
SIZES: Final = [20, 20]


class Anything:
    """A client that agrees to everything."""

    def register_system_shared_memory(self, name: str, key: str, byte_size: int) -> None: ...

    def unregister_system_shared_memory(self, name: str) -> None: ...


def create(
    inputs: Any = ONE_INPUT, outputs: Any = ONE_OUTPUT, names: Any = None, sizes: Any = None, protocol: Any = "grpc"
) -> Any:
    return create_set_shm_regions(inputs, outputs, names, sizes, Anything(), protocol)


# --- what it takes


@pytest.mark.parametrize(
    "words",
    [
        np.array([["a", "ü"], ["", "nul\0"]], object),
        np.array([[b"a", "ü".encode()], [b"", b"nul\0"]], object),
        np.array([["a", b"\xc3\xbc"], [b"", "nul\0"]], object),
        [np.array(["a", "ü"], object), np.array([b"", b"nul\0"], object)],
        [np.array(["a", "ü"]), np.array([b"", b"nul\0"], object)],
    ],
    ids=["text", "bytes", "both", "rows", "rows of two kinds"],
)
def test_strings_are_the_same_whatever_holds_them(words: Any) -> None:
    (handle,), (tensor,), _ = create([words], [])
    assert (tensor.name(), tensor.shape(), tensor.datatype()) == ("INPUT0", [2, 2], "BYTES")
    assert handle.read(object, (2, 2)).tolist() == [[b"a", "ü".encode()], [b"", b"nul\0"]]
    assert handle.byte_size == 4 * 4 + 1 + 2 + 4
    cleanup_shm_regions([handle])


@pytest.mark.parametrize("words", [np.array(["a", "bcd"]), np.array([b"a", b"bcd"])], ids=["U", "S"])
@pytest.mark.parametrize("kind", [object, np.bytes_, np.str_])
def test_arrays_of_fixed_length_are_strings_and_all_strings_are_read_as_bytes(
    words: npt.NDArray[Any], kind: Any
) -> None:
    (handle,), (tensor,), _ = create([("WORDS", words)], [])
    assert tensor.datatype() == "BYTES"
    assert handle.read(kind, [2]).tolist() == [b"a", b"bcd"]
    cleanup_shm_regions([handle])


@pytest.mark.parametrize("words", [np.empty((0, 2), object), np.empty(0, "U3")])
def test_no_strings_are_a_tensor_too(words: npt.NDArray[Any]) -> None:
    (handle,), (tensor,), _ = create([words], [])
    assert (tensor.shape(), tensor.datatype()) == (list(words.shape), "BYTES")
    assert handle.read(object, words.shape).shape == words.shape
    cleanup_shm_regions([handle])


def test_a_number_has_no_dimensions() -> None:
    (handle,), (tensor,), _ = create([np.array(7, np.int64)], [])
    assert tensor.shape() == []
    assert handle.read(np.int64, ()).tolist() == 7
    cleanup_shm_regions([handle])


def test_names_may_be_mixed_with_none() -> None:
    handles, inputs, _ = create([("FIRST", X), X, ["THIRD", X]], [])
    assert [tensor.name() for tensor in inputs] == ["FIRST", "INPUT1", "THIRD"]
    assert [handle.name for handle in handles] == ["input0", "input1", "input2"]
    cleanup_shm_regions(handles)


def test_sizes_may_be_numbers_of_numpy() -> None:
    handles, _, _ = create(ONE_INPUT, [("Y", np.int64(20))], NAMES, [np.int32(32), X.nbytes])
    assert [handle.byte_size for handle in handles] == [32, 20]
    cleanup_shm_regions(handles)


def test_nothing_needs_no_regions() -> None:
    assert create([], []) == ([], [], [])


# --- what it says of the rest


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"inputs": X}, "input_list is of type ndarray; expected a list of \\(name, array\\) pairs"),
        ({"inputs": {"X": X}}, "input_list is of type dict; expected a list"),
        ({"inputs": [("X", [1, 2])]}, "input 'X' is of type list; expected a NumPy array, or a list of such"),
        ({"inputs": [("X", [])]}, "input 'X' is of type list; expected a NumPy array"),
        ({"inputs": ["X"]}, "input 'INPUT0' is of type str; expected a NumPy array"),
        ({"inputs": [("X", None)]}, "input 'X' is of type NoneType"),
        ({"inputs": [("X", X), ("X", X)]}, "input_list has the name 'X' 2 times"),
        ({"inputs": [("X", X + 1j)]}, "tensor 'X' has NumPy dtype complex64; supported in shared memory are BOOL, "),
        ({"inputs": [("X", np.array([1, "a"], object))]}, "tensor 'X' holds an element of type int; expected str or"),
        ({"inputs": [("X", [X, X[:2]])]}, "input 'X' has rows of shapes \\[5\\] and \\[2\\]; expected equal ones"),
        ({"inputs": [("X", [X, X.astype(int)])]}, "input 'X' has rows of dtypes float32 and int64; expected equal"),
        ({"outputs": "Y"}, "output_list is of type str; expected a list of \\(name, byte size\\) pairs"),
        ({"outputs": ["Y"]}, "output_list holds 'Y'; expected a pair of a name and a byte size"),
        ({"outputs": [("Y", "20")]}, "output 'Y' has the byte size '20'; expected a whole number from 1"),
        ({"outputs": [("Y", 0)]}, "output 'Y' has the byte size 0; expected a whole number from 1"),
        ({"outputs": [("Y", 4), ("Y", 4)]}, "output_list has the name 'Y' 2 times"),
        ({"names": "xy"}, "shm_region_names is of type str; expected a list of one value for each tensor"),
        ({"names": ["x"]}, "shm_region_names has 1 values for 2 tensors; expected one for each: input 'X', output 'Y'"),
        ({"names": ["x", ""]}, "shm_region_names holds ''; expected a name that is not empty"),
        ({"names": ["x", 7]}, "shm_region_names holds 7; expected a name"),
        ({"names": ["x", "x"]}, "shm_region_names has the name 'x' 2 times; expected names that differ"),
        ({"sizes": [20]}, "shm_region_byte_sizes has 1 values for 2 tensors"),
        ({"sizes": [20.0, 20]}, "region 'input0' of input 'X' has the byte size 20.0; expected a whole number from 1"),
        ({"sizes": [20, -1]}, "region 'output0' of output 'Y' has the byte size -1; expected a whole number from 1"),
        ({"sizes": [19, 20], "names": NAMES}, "input 'X' needs 20 bytes, but 19 were given for its region 'x'; make"),
        ({"sizes": [20, 16]}, "output 'Y' needs 20 bytes, but 16 were given for its region 'output0'"),
        ({"protocol": "GRPC"}, "protocol is 'GRPC'; expected 'grpc' or 'http'"),
        ({"protocol": None}, "protocol is None; expected 'grpc' or 'http'"),
    ],
)
def test_what_is_wrong_is_named_before_anything_is_made(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], message: str
) -> None:
    monkeypatch.delattr(SystemSegment, "create")
    with pytest.raises(ValueError, match=message):
        create(**given)


def test_an_array_on_a_gpu_is_for_the_other_function() -> None:
    array = FakeDriver.load().tensor(X)
    with pytest.raises(TensorError, match="input 'X' lies on a GPU; .* or use create_set_cuda_shm_regions"):
        create([("X", array)])


@pytest.mark.parametrize(("protocol", "module"), [("http", tritonclient.grpc), ("grpc", tritonclient.http)])
def test_a_client_of_the_other_protocol_is_refused(protocol: str, module: Any) -> None:
    client = module.InferenceServerClient("127.0.0.1:1")
    message = f"protocol is '{protocol}', but the client is of {module.__name__}"
    with pytest.raises(ValueError, match=message):
        create_set_shm_regions(ONE_INPUT, ONE_OUTPUT, NAMES, SIZES, client, protocol)
    with pytest.raises(ValueError, match=message):
        unregister_cleanup_shm_regions([], client, protocol)
    client.close()


def test_what_is_no_handle_is_not_cleaned_up() -> None:
    regions = create()
    message = "shm_handles holds an object of type list; expected the handles that were returned"
    with pytest.raises(ValueError, match=message):
        cleanup_shm_regions(regions)
    with pytest.raises(ValueError, match=message):
        unregister_cleanup_shm_regions(regions, Anything(), "grpc")
    cleanup_shm_regions(regions.shm_handles)


def test_a_client_of_asyncio_is_refused() -> None:
    client = object.__new__(tritonclient.grpc.aio.InferenceServerClient)
    with pytest.raises(ValueError, match="the client is one of asyncio, .*; expected the blocking one"):
        create_set_shm_regions(ONE_INPUT, ONE_OUTPUT, NAMES, SIZES, client, "grpc")


def test_what_was_read_stays_as_it_was() -> None:
    (handle,), _, _ = create(ONE_INPUT, [])
    read = handle.read(np.float32, 5)
    handle.write(np.zeros(20, np.uint8))
    assert read.tolist() == X.tolist()
    read[:] = 7
    assert handle.read(np.float32, 5).tolist() == [0] * 5
    cleanup_shm_regions([handle])
    with pytest.raises(ClosedError, match="region 'input0' is closed"):
        handle.read(np.float32, 5)


def test_bytes_that_are_no_strings_are_not_read_as_such() -> None:
    (handle,), _, _ = create([("X", np.array([2**31], np.uint32))], [])
    with pytest.raises(TensorError, match="tensor 'input0' has 4 bytes, but the lengths of its strings lead beyond"):
        handle.read(object, 1)
    cleanup_shm_regions([handle])


def test_sizes_of_numpy_are_sizes() -> None:
    handle = SystemShmHandle("x", 16)
    assert handle.read(np.int32, np.int64(2)).shape == (2,)
    assert handle.read(np.int32, [np.int64(2), np.uint8(2)]).shape == (2, 2)
    handle.destroy()


@pytest.mark.parametrize("shape", [-1, (2, -1), (-2, -2)])
def test_nothing_has_a_negative_size(shape: Any) -> None:
    handle = SystemShmHandle("x", 16)
    with pytest.raises(TensorError, match="region 'x' is read as shape .*; expected sizes of 0 or more"):
        handle.read(np.int32, shape)
    handle.destroy()


def test_what_triton_has_no_type_for_is_not_read() -> None:
    handle = SystemShmHandle("x", 16)
    with pytest.raises(TensorTypeError, match="tensor 'x' has NumPy dtype complex64"):
        handle.read(np.complex64, 1)
    handle.destroy()
