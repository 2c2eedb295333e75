"""TensorView: a tensor where it lies, for any array library. Strings: no length is believed, nothing is read twice."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import struct
import threading
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from shm_backend_utils import dtypes
from shm_backend_utils.dtypes import DType
from shm_backend_utils.errors import DeviceMemoryError, TensorError, TensorTypeError
from shm_backend_utils.model.triton import InBandView
from shm_backend_utils.tensors import dlpack
from shm_backend_utils.tensors.strings import Strings
from shm_backend_utils.tensors.view import BufferAttributes, MemoryType, StringsView, TensorView

NUMPY_SPEAKS_VERSIONS = np.lib.NumpyVersion(np.__version__) >= "2.1.0"


def view_of(array: npt.NDArray[Any], *, writable: bool = True) -> TensorView:
    memory = array.view()
    memory.flags.writeable = writable
    return TensorView("IMAGE", memory, dtypes.from_numpy(array.dtype, "IMAGE"), "direct")


def numpy_takes(view: Any) -> npt.NDArray[Any]:
    taken: npt.NDArray[Any] = np.from_dlpack(view)
    return taken


def floats() -> npt.NDArray[np.float32]:
    return np.array([[0, 1, 2], [3, 4, 5]], np.float32)


@pytest.mark.parametrize("dtype", dtypes.BY_NAME.values(), ids=str)
def test_a_view_knows_its_tensor(dtype: DType) -> None:
    view = view_of(np.zeros((2, 3), dtype.numpy))
    assert (view.name, view.path, view.shape) == ("IMAGE", "direct", (2, 3))
    assert (view.dtype, view.triton_dtype) == (dtype.numpy, dtype.name)
    assert repr(view) == f"<TensorView 'IMAGE' {dtype.name} [2, 3] path=direct>"
    assert view.__dlpack_device__() == (1, 0)


def test_a_view_knows_where_its_bytes_lie_and_does_not_change_with_one_of_its_arrays() -> None:
    for shape, nbytes in (((2, 3), 24), ((), 4), ((0, 3), 0)):
        assert view_of(np.zeros(shape, np.float32)).attributes == BufferAttributes(MemoryType.CPU, 0, nbytes, None)
    view = view_of(floats())
    view.numpy().flags.writeable = False
    assert view.writable
    assert view.numpy() is not view.numpy()
    with pytest.raises(TensorTypeError, match=r"tensor 'IMAGE' holds FP32, no strings; use .numpy\(\)"):
        view_of(floats()).strings()


@pytest.mark.parametrize("take", [TensorView.numpy, numpy_takes])
def test_an_array_made_from_a_view_outlives_it(take: Any) -> None:
    array = floats()
    alive = weakref.ref(array)
    view = view_of(array)
    taken = take(view)
    array[1, 2] = 50
    assert taken[1, 2] == 50
    del array, view
    assert alive() is not None
    del taken
    assert alive() is None


@pytest.mark.parametrize("version", [None, (0, 8)])
def test_a_read_only_view_is_not_given_to_a_consumer_that_could_not_know(version: tuple[int, int] | None) -> None:
    view = view_of(floats(), writable=False)
    with pytest.raises(BufferError, match=r"'IMAGE' is read-only, .* ask for max_version=\(1, 0\), or use .numpy\(\)"):
        view.__dlpack__(max_version=version)


@pytest.mark.parametrize(
    ("wanted", "refusal"),
    [
        *(
            ({"stream": stream}, "'IMAGE' is in CPU memory, which has no stream; pass stream=None")
            for stream in (0, -1)
        ),
        *(({"dl_device": device}, r"'IMAGE' is on device \(1, 0\), asked for was") for device in ((2, 0), (1, 1))),
        ({"copy": True}, "'IMAGE' never copies; copy the array that you make from it"),
    ],
    ids=str,
)
def test_a_view_has_no_stream_does_not_move_and_does_not_copy(wanted: dict[str, Any], refusal: str) -> None:
    with pytest.raises(BufferError, match=refusal):
        view_of(floats()).__dlpack__(**wanted)
    for so_anyway in ({"dl_device": (1, 0)}, {"copy": False}, {"stream": None, "copy": None}):
        assert "dltensor" in repr(view_of(floats()).__dlpack__(**so_anyway))


@pytest.mark.parametrize("writable", [True, False])
def test_numpy_makes_an_array_of_the_very_memory(writable: bool) -> None:
    array = floats()
    view = view_of(array, writable=writable)
    for made in (np.asarray(view), np.asarray(view, np.float32), np.array(view, copy=False)):
        assert (made.dtype, made.shape, made.ctypes.data) == (array.dtype, array.shape, array.ctypes.data)
        assert made.flags.writeable is writable
    assert np.add(view, view).tolist() == (2 * array).tolist()
    if NUMPY_SPEAKS_VERSIONS:  # it knows versioned capsules since 2.1
        assert numpy_takes(view).flags.writeable is writable
    with pytest.raises(ValueError, match="tensor 'IMAGE' is float32, which cannot become int64 without a copy"):
        view.__array__(np.int64, copy=False)


DELIVERED: Any = SimpleNamespace(shape=lambda: [2])
NUMBERS = "np.asarray(view), or torch.from_dlpack(view), or another library's"
STRINGS = StringsView("IMAGE", Strings.of("IMAGE", np.array(["a"], object)), "direct")
ARRAY_OF: dict[str, tuple[TensorView, str]] = {
    "TensorView": (view_of(floats()), NUMBERS),
    "InBandView": (InBandView("IMAGE", DELIVERED, dtypes.BY_NAME["FP32"], None), NUMBERS),  # type: ignore[arg-type]
    "StringsView": (STRINGS, "view.strings() or view.numpy()"),
}


@pytest.mark.parametrize("kind", ARRAY_OF)
@pytest.mark.parametrize(
    "use", [lambda view: view * 2, lambda view: 2 - view, lambda view: view[0], list, float, lambda view: view < 1]
)
def test_a_view_that_is_taken_for_an_array_says_how_to_make_one(kind: str, use: Callable[[Any], Any]) -> None:
    view, ways = ARRAY_OF[kind]
    with pytest.raises(TypeError) as error:
        use(view)
    assert str(error.value) == (
        f"this {kind} supports neither arithmetic nor indexing; make an array of tensor 'IMAGE' first: {ways}"
    )


@pytest.mark.parametrize("kind", ARRAY_OF)
def test_a_view_without_what_arrays_have_says_how_to_make_one(kind: str) -> None:
    view, ways = ARRAY_OF[kind]
    with pytest.raises(AttributeError) as error:
        view.as_numpy()  # type: ignore[attr-defined]
    expected = f"this {kind} has no attribute 'as_numpy'; make an array of tensor 'IMAGE' first: {ways}"
    assert str(error.value) == expected
    assert not hasattr(view, "__cuda_array_interface__")
    with pytest.raises(AttributeError):  # and does not ask itself for ever
        print(TensorView.__new__(TensorView).name)


@pytest.mark.parametrize("dtype", [dtypes.BY_NAME["FP32"], dtypes.BF16], ids=str)
def test_a_consumer_of_versions_reads_unversioned_capsules_too(monkeypatch: pytest.MonkeyPatch, dtype: DType) -> None:
    monkeypatch.setattr(dlpack, "NUMPY_MAKES_VERSIONED", False)
    array = np.ones((2, 3), dtype.numpy)
    taken = dlpack.consume(view_of(array, writable=False).__dlpack__(max_version=(1, 0)))
    assert (taken.dtype, taken.shape, taken.ctypes.data) == (dtype.numpy, (2, 3), array.ctypes.data)


Bytes = npt.NDArray[np.uint8]
WORDS = [b"a", b"", b"\x00\xff\x00", "ü".encode()]
ENCODED = b"\x01\0\0\0a" + b"\0\0\0\0" + b"\x03\0\0\0\x00\xff\x00" + b"\x02\0\0\0\xc3\xbc"
NO_ACCESS = 0  # mman.h: PROT_NONE
NO_RESERVE = 0x4000  # mman.h: MAP_NORESERVE

LIES = {
    "one byte less": (ENCODED[:-1], (4,)),
    "one more than there are": (ENCODED, (5,)),
    "a length that is cut off": (ENCODED[:-4], (4,)),
    "a length beyond the end": (struct.pack("<I", 5) + b"four", (1,)),
    "a length beyond the end among good ones": (b"\x01\0\0\0a" + b"\x01\0\0\x80b" + b"\0\0\0\0", (3,)),
    "the largest length": (b"\xff\xff\xff\xff" + b"four", (1,)),
    "a negative length": (struct.pack("<i", -4) + b"four", (1,)),
    "a length that takes the next string's": (b"\x06\0\0\0a" + b"\x01\0\0\0b", (2,)),
    "nothing": (b"", (1,)),
    "nothing, without dimensions": (b"", ()),
    "more than a machine has memory for": (ENCODED, (2**20, 2**20)),
    "more than there are addresses": (ENCODED, (2**62, 2**62)),
}

READINGS: dict[str, Callable[[Strings], object]] = {
    "the first": lambda strings: strings[0],
    "the last": lambda strings: strings[-1],
    "some": lambda strings: strings[:1],
    "one after another": lambda strings: next(iter(strings)),
    "as an array": Strings.numpy,
    "whether one is there": lambda strings: b"a" in strings,
}


@pytest.fixture
def at_the_end() -> Iterator[Callable[[bytes], Bytes]]:
    """Puts data where its last byte is the last that may be read: reading further is a segmentation fault."""
    protect = ctypes.CDLL(None).mprotect
    whole = np.frombuffer(mmap.mmap(-1, 2 * mmap.PAGESIZE), np.uint8)
    behind = ctypes.c_void_p(whole.ctypes.data + mmap.PAGESIZE)
    assert protect(behind, mmap.PAGESIZE, NO_ACCESS) == 0

    def put(data: bytes) -> Bytes:
        memory = whole[mmap.PAGESIZE - len(data) : mmap.PAGESIZE]
        memory[:] = np.frombuffer(data, np.uint8)
        return memory

    yield put
    assert protect(behind, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE) == 0


def encoded(data: bytes = ENCODED, shape: tuple[int, ...] = (4,)) -> Strings:
    return Strings.encoded_as("TEXT", np.frombuffer(data, np.uint8), shape)


def given(*elements: object) -> Strings:
    array = np.empty(len(elements), object)
    array[:] = elements
    return Strings.of("TEXT", array)


@pytest.mark.parametrize("strings", [encoded(), given(*WORDS)])
def test_strings_are_a_sequence(strings: Strings) -> None:
    assert (list(strings), strings.packed(), repr(strings)) == (WORDS, ENCODED, "<Strings 'TEXT' [4]>")
    assert {type(word) for word in strings} == {bytes}
    assert (len(strings), strings[0], strings[-1], strings[1:3]) == (4, WORDS[0], WORDS[3], WORDS[1:3])
    assert b"a" in strings
    assert strings.index(b"") == 1
    assert [*reversed(strings)] == WORDS[::-1]
    with pytest.raises(IndexError):
        strings[4]
    strings.numpy()[:] = None  # it is the reader's own
    assert strings.numpy().tolist() == WORDS


@pytest.mark.parametrize("element", [None, 1, 2.5, [b"a"], bytearray(b"a"), np.uint8(1)], ids=repr)
def test_what_is_no_string_is_refused_by_its_type(element: object) -> None:
    message = f"tensor 'TEXT' holds an element of type {type(element).__name__}; expected str or bytes"
    with pytest.raises(TensorTypeError, match=message) as caught:
        given(b"a", element).encoded  # noqa: B018
    assert caught.value.tensor == "TEXT"


@pytest.mark.parametrize("lie", LIES)
def test_lengths_beyond_the_end_are_refused_by_every_reading(at_the_end: Callable[[bytes], Bytes], lie: str) -> None:
    data, shape = LIES[lie]
    message = f"tensor 'TEXT' has {len(data)} bytes, but the lengths of its strings lead beyond them"
    for read in READINGS.values():
        strings = Strings.encoded_as("TEXT", at_the_end(data), shape)
        assert (strings.shape, strings.encoded.tobytes()) == (shape, data), "nothing is read before it is asked for"
        for _ in range(2):
            with pytest.raises(TensorError, match=message) as caught:
                read(strings)
            assert caught.value.tensor == "TEXT"


def test_room_behind_the_strings_costs_nothing() -> None:
    room = np.frombuffer(mmap.mmap(-1, 1 << 36, mmap.MAP_PRIVATE | NO_RESERVE), np.uint8)
    room[: len(ENCODED)] = np.frombuffer(ENCODED, np.uint8)
    assert list(Strings.encoded_as("TEXT", room, (4,))) == WORDS
    assert Strings.encoded_as("TEXT", room, (4,)).packed() == ENCODED


def test_lengths_that_change_while_they_are_read_lead_nowhere(at_the_end: Callable[[bytes], Bytes]) -> None:
    memory = at_the_end(b"\x01\0\0\0a" * 300)
    is_over = threading.Event()

    def change() -> None:
        dice = np.random.default_rng(1)
        while not is_over.is_set():
            memory[dice.integers(300) * 5] = dice.integers(3)

    peer = threading.Thread(target=change)
    peer.start()
    try:
        for _ in range(300):
            with contextlib.suppress(TensorError):
                strings = list(Strings.encoded_as("TEXT", memory, (300,)))
                assert len(strings) == 300
    finally:
        is_over.set()
        peer.join()


@pytest.mark.parametrize("reading", READINGS)
def test_what_was_read_once_stays_so_whatever_is_written_there_next(reading: str) -> None:
    memory = np.frombuffer(bytearray(ENCODED), np.uint8)
    strings = Strings.encoded_as("TEXT", memory, (4,))
    READINGS[reading](strings)
    memory[:] = 255
    assert list(strings) == WORDS


@pytest.fixture
def view() -> StringsView:
    return StringsView("TEXT", encoded(ENCODED + b"room", (2, 2)), "direct")


def test_a_view_of_strings_knows_its_tensor_which_others_take_by_a_copy_alone(view: StringsView) -> None:
    assert (view.name, view.path, view.shape) == ("TEXT", "direct", (2, 2))
    assert (view.dtype, view.triton_dtype) == (np.dtype(object), "BYTES")
    assert repr(view) == "<TensorView 'TEXT' BYTES [2, 2] path=direct>"
    assert (view.writable, list(view.strings())) == (False, WORDS)
    for array in (view.numpy(), view.array):
        assert array.tolist() == [WORDS[:2], WORDS[2:]]
    assert view.attributes == BufferAttributes(MemoryType.CPU, 0, len(ENCODED) + 4, None), "with the room behind them"
    with pytest.raises(BufferError, match="'TEXT' holds strings, which DLPack has no type for; use .strings()"):
        view.__dlpack__(max_version=(1, 0))
    with pytest.raises(DeviceMemoryError):
        view.cupy()
    assert np.asarray(view).tolist() == np.array(view).tolist() == [WORDS[:2], WORDS[2:]]
    with pytest.raises(ValueError, match="tensor 'TEXT' holds strings, which can become an array only by a copy"):
        view.__array__(copy=False)
