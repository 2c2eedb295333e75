"""``shm_util``: what it takes, also by the arguments of the original, what it refuses, and how it unregisters."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http
import tritonclient.utils
from tritonclient.utils import InferenceServerException, shared_memory

from shm_backend_utils.client.paths.triton_shm import unregister_when_free
from shm_backend_utils.compat import shm_util as su
from shm_backend_utils.compat.shm_util import (
    SystemShmHandle,
    cleanup_shm_regions,
    create_set_shm_regions,
    unregister_cleanup_shm_regions,
)
from shm_backend_utils.errors import TensorError, TensorTypeError
from shm_backend_utils.memory.segment import SystemSegment
from shm_backend_utils.testing.fake_cuda.driver import FakeDriver

FIVE: Final = np.arange(1, 6, dtype=np.float32)
ONE_INPUT: Final[Any] = [("X", FIVE)]
ONE_OUTPUT: Final[Any] = [("Y", 20)]
NAMES: Final = ["x", "y"]
SIZES: Final = [20, 20]


class Asked:
    """A client, or a tensor, that notes what it is asked for."""

    def __init__(self, *_: Any) -> None:
        self.told: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self.told.append((name, *arguments))


def create(
    inputs: Any = ONE_INPUT, outputs: Any = ONE_OUTPUT, names: Any = None, sizes: Any = None, protocol: Any = "grpc"
) -> Any:
    return create_set_shm_regions(inputs, outputs, names, sizes, Asked(), protocol)


@pytest.mark.parametrize(
    "words",
    [
        np.array([["a", "ü"], ["", "nul\0"]], object),
        np.array([[b"a", "ü".encode()], [b"", b"nul\0"]], object),
        np.array([["a", b"\xc3\xbc"], [b"", "nul\0"]], object),
        [np.array(["a", "ü"], object), np.array([b"", b"nul\0"], object)],
        [np.array(["a", "ü"]), np.array([b"", b"nul\0"], object)],
    ],
)
def test_strings_are_the_same_whatever_holds_them(words: Any) -> None:
    (handle,), (tensor,), _ = create([words], [])
    assert (tensor.name(), tensor.shape(), tensor.datatype()) == ("INPUT0", [2, 2], "BYTES")
    assert handle.read(object, (2, 2)).tolist() == [[b"a", "ü".encode()], [b"", b"nul\0"]]
    assert handle.byte_size == 4 * 4 + 1 + 2 + 4
    cleanup_shm_regions([handle])


@pytest.mark.parametrize("tensor", [np.empty((0, 2), object), np.empty(0, "U3"), np.array(7, np.int64)])
def test_nothing_and_a_number_are_tensors_too(tensor: npt.NDArray[Any]) -> None:
    (handle,), (described,), _ = create([tensor], [])
    kind, name = (np.int64, "INT64") if tensor.dtype == np.int64 else (object, "BYTES")
    assert (described.shape(), described.datatype()) == (list(tensor.shape), name)
    assert handle.read(kind, tensor.shape).tolist() == tensor.tolist()
    cleanup_shm_regions([handle])
    assert create([], []) == ([], [], [])


def test_what_is_read_has_a_size_and_a_type_that_triton_has() -> None:
    handle = SystemShmHandle("x", 16)
    assert handle.read(np.int32, np.int64(2)).shape == (2,)
    assert handle.read(np.int32, [np.int64(2), np.uint8(2)]).shape == (2, 2)
    for shape in (-1, (2, -1), (-2, -2)):
        with pytest.raises(TensorError, match="region 'x' is read as shape .*; expected sizes of 0 or more"):
            handle.read(np.int32, shape)
    with pytest.raises(TensorTypeError, match="tensor 'x' has NumPy dtype complex64"):
        handle.read(np.complex64, 1)
    handle.write(np.full(4, 2**31, np.uint32).view(np.uint8))
    with pytest.raises(TensorError, match="tensor 'x' has 16 bytes, but the lengths of its strings lead beyond"):
        handle.read(object, 1)
    handle.destroy()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"inputs": FIVE}, "input_list is of type ndarray; expected a list of \\(name, array\\) pairs"),
        ({"inputs": {"X": FIVE}}, "input_list is of type dict; expected a list"),
        ({"inputs": [("X", [1, 2])]}, "input 'X' is of type list; expected a NumPy array, or a list of arrays"),
        ({"inputs": [("X", [])]}, "input 'X' is of type list; expected a NumPy array"),
        ({"inputs": ["X"]}, "input 'INPUT0' is of type str; expected a NumPy array"),
        ({"inputs": [("X", None)]}, "input 'X' is of type NoneType"),
        ({"inputs": [("X", FIVE), ("X", FIVE)]}, "input_list has the name 'X' 2 times"),
        ({"inputs": [("X", FIVE + 1j)]}, "tensor 'X' has NumPy dtype complex64; Triton has BOOL, "),
        ({"inputs": [("X", np.array([1, "a"], object))]}, "tensor 'X' holds an element of type int; expected str or"),
        ({"inputs": [("X", [FIVE, FIVE[:2]])]}, "input 'X' has rows of shapes \\[5\\] and \\[2\\]; expected equal"),
        ({"inputs": [("X", [FIVE, FIVE.astype(int)])]}, "input 'X' has rows of dtypes float32 and int64; expected"),
        ({"outputs": "Y"}, "output_list is of type str; expected a list of \\(name, byte size\\) pairs"),
        ({"outputs": ["Y"]}, "output_list holds 'Y'; expected a pair of a name and a byte size"),
        ({"outputs": [("Y", "20")]}, "output 'Y' has the byte size '20'; expected a positive integer"),
        ({"outputs": [("Y", 0)]}, "output 'Y' has the byte size 0; expected a positive integer"),
        ({"outputs": [("Y", 4), ("Y", 4)]}, "output_list has the name 'Y' 2 times"),
        ({"names": "xy"}, "shm_region_names is of type str; expected a list of one value for each tensor"),
        ({"names": ["x"]}, "shm_region_names has 1 values for 2 tensors; expected one for each: input 'X', output 'Y'"),
        ({"names": ["x", ""]}, "shm_region_names holds ''; expected a name that is not empty"),
        ({"names": ["x", 7]}, "shm_region_names holds 7; expected a name"),
        ({"names": ["x", "x"]}, "shm_region_names has the name 'x' 2 times; expected names that differ"),
        ({"sizes": [20]}, "shm_region_byte_sizes has 1 values for 2 tensors"),
        ({"sizes": [20.0, 20]}, "region 'input0' of input 'X' has the byte size 20.0; expected a positive integer"),
        ({"sizes": [20, -1]}, "region 'output0' of output 'Y' has the byte size -1; expected a positive integer"),
        ({"sizes": [19, 20], "names": NAMES}, "input 'X' needs 20 bytes, but 19 were given for its region 'x'; make"),
        ({"sizes": [20, 16]}, "output 'Y' needs 20 bytes, but 16 were given for its region 'output0'"),
        ({"protocol": "GRPC"}, "protocol is 'GRPC'; expected 'grpc' or 'http'"),
        ({"protocol": None}, "protocol is None; expected 'grpc' or 'http'"),
    ],
)
def test_what_is_wrong_is_named_at_once(monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], message: str) -> None:
    monkeypatch.delattr(SystemSegment, "create")
    with pytest.raises(ValueError, match=message):
        create(**given)


def test_an_array_on_a_gpu_is_for_the_other_function() -> None:
    array = FakeDriver.load().tensor(FIVE)
    with pytest.raises(TensorError, match="input 'X' lies on a GPU; .* or use create_set_cuda_shm_regions"):
        create([("X", array)])


@pytest.mark.parametrize(("protocol", "module"), [("http", tritonclient.grpc), ("grpc", tritonclient.http)])
def test_a_client_of_the_other_protocol_or_of_asyncio_is_refused(protocol: str, module: Any) -> None:
    client = module.InferenceServerClient("127.0.0.1:1")
    message = f"protocol is '{protocol}', but the client is of {module.__name__}"
    with pytest.raises(ValueError, match=message):
        create_set_shm_regions(ONE_INPUT, ONE_OUTPUT, NAMES, SIZES, client, protocol)
    with pytest.raises(ValueError, match=message):
        unregister_cleanup_shm_regions([], client, protocol)
    client.close()
    client = object.__new__(tritonclient.grpc.aio.InferenceServerClient)
    with pytest.raises(ValueError, match="the client is an asyncio client; expected a blocking one"):
        create_set_shm_regions(ONE_INPUT, ONE_OUTPUT, NAMES, SIZES, client, "grpc")


def test_what_is_no_handle_is_not_cleaned_up() -> None:
    regions = create()
    message = "shm_handles holds an object of type list; expected the handles that were returned"
    with pytest.raises(ValueError, match=message):
        cleanup_shm_regions(regions)
    with pytest.raises(ValueError, match=message):
        unregister_cleanup_shm_regions(regions, Asked(), "grpc")
    cleanup_shm_regions(regions.shm_handles)


X: Final = np.arange(4, dtype=np.float32)
SHM: Final = Path("/dev/shm")


def test_without_shared_memory_there_is_nothing_to_do_and_what_cannot_be_made_leaves_nothing() -> None:
    nothing = Asked()
    assert su.create_set_shm_regions([X], [X], 16, 16, ["OUTPUT0"], None, None, False, False) == ([], [])
    assert su.create_set_either_shm_region(["a", "b"], [X], 16, 16, False, False) == []
    su.register_add_shm_regions([], [], [], None, [], 16, 16, 16, 16, False, False, nothing)
    su.register_add_either_shm_regions([], [], ["a", "b"], ([], []), 0, 16, 16, False, False, nothing)
    su.unregister_cleanup_shm_regions([], [], None, [], False, False)
    assert nothing.told == []
    with pytest.raises(ValueError, match="are both set; expected one of them"):
        su.create_set_shm_regions([X], [X], 16, 16, ["OUTPUT0"], None, None, True, True)
    with pytest.raises(ValueError, match="are both set; expected one of them"):
        su.create_set_either_shm_region(["a", "b"], [X], 16, 16, True, True)
    names = ["upstream0", "upstream1", "upstream2"]
    with pytest.raises(shared_memory.SharedMemoryException):
        su.create_set_shm_regions([X], [X], -1, 0, ["OUTPUT0"], names, None, True, False)
    assert [name for name in names if (SHM / name).exists()] == []


def test_memory_of_a_gpu_is_tritonclients_too(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[Any, ...]] = []
    module = types.ModuleType("tritonclient.utils.cuda_shared_memory")
    for name in ("set_shared_memory_region", "destroy_shared_memory_region"):
        setattr(module, name, lambda *given, name=name: done.append((name, *given)))
    vars(module).update(
        create_shared_memory_region=lambda name, byte_size, device: (name, byte_size, device),
        get_raw_handle=lambda handle: f"raw {handle[0]}",
    )
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(tritonclient.utils, "cuda_shared_memory", module, raising=False)
    client = Asked()
    monkeypatch.setattr(tritonclient.http, "InferenceServerClient", lambda url: client)
    inputs = [Asked(), Asked()]
    names, handles = su.create_set_shm_regions([X], [X], 8, 8, ["OUTPUT1"], ["a", "b", "d"], None, False, True)
    assert handles == [("a_data", 16, 0), ("b_data", 16, 0), None, ("d_data", 8, 0)]
    su.register_add_shm_regions(inputs, ["OUTPUT1"], names, None, handles, 16, 16, 8, 8, False, True, client)
    assert client.told[-2:] == [
        ("unregister_cuda_shared_memory", "d_data"),
        ("register_cuda_shared_memory", "d_data", "raw d_data", 0, 8),
    ]
    assert inputs[1].told == [("set_shared_memory", "b_data", 16)]
    su.unregister_cleanup_shm_regions(names, handles, None, ["OUTPUT1"], False, True)
    gone = [handle for name, handle, *_ in done if name == "destroy_shared_memory_region"]
    assert sorted(gone) == [("a_data", 16, 0), ("b_data", 16, 0), ("d_data", 8, 0)]
    assert client.told[-1] == ("close",)


def test_a_region_in_use_is_unregistered_when_the_server_has_let_go_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Server(Asked):
        def unregister_system_shared_memory(self, name: str) -> None:
            self.told.append(("unregister_system_shared_memory", name))
            if len(self.told) == 1:
                raise InferenceServerException(f"Cannot unregister region '{name}', it is currently in use.")

    server = Server()
    monkeypatch.setattr(tritonclient.http, "InferenceServerClient", lambda url: server)
    names, handles = su.create_set_shm_regions([X], [X], 8, 8, ["OUTPUT0"], ["e", "f", "g"], None, True, False)
    su.unregister_cleanup_shm_regions(names, handles, None, ["OUTPUT0"], True, False)
    assert [name for _, *given in server.told for name in given] == ["g_data", "g_data", "f_data", "e_data"]


def test_what_stays_in_use_and_another_refusal_at_once_is_an_error() -> None:
    attempts: list[str] = []

    def unregister(message: str) -> None:
        attempts.append(message)
        raise InferenceServerException(message)

    in_use = "Cannot unregister region 'x', it is currently in use."
    with pytest.raises(InferenceServerException, match="currently in use"):
        unregister_when_free(lambda: unregister(in_use), timeout_s=0.03)
    assert len(attempts) > 1
    attempts.clear()
    with pytest.raises(InferenceServerException, match="no"):
        unregister_when_free(lambda: unregister("no"))
    assert len(attempts) == 1
