"""Tensors of strings as bytes, in memory that a peer writes to: no length is believed, and nothing is read twice."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import struct
import threading
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import pytest

from shm_backend_utils.errors import DeviceMemoryError, TensorError, TensorTypeError
from shm_backend_utils.tensors.attributes import BufferAttributes, MemoryType
from shm_backend_utils.tensors.strings import Strings
from shm_backend_utils.tensors.strings_view import StringsView

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


def test_text_becomes_utf_8() -> None:
    strings = given("ü", "日本語", b"\xff")
    assert list(strings) == ["ü".encode(), "日本語".encode(), b"\xff"]
    assert strings.encoded.tobytes() == b"\x02\0\0\0\xc3\xbc" + b"\x09\0\0\0" + "日本語".encode() + b"\x01\0\0\0\xff"


@pytest.mark.parametrize("strings", [encoded(), given(*WORDS)], ids=["bytes", "objects"])
def test_strings_are_a_sequence(strings: Strings) -> None:
    assert (list(strings), strings.packed()) == (WORDS, ENCODED)
    assert {type(word) for word in strings} == {bytes}
    assert (len(strings), strings[0], strings[-1], strings[1:3]) == (4, WORDS[0], WORDS[3], WORDS[1:3])
    assert b"a" in strings
    assert strings.index(b"") == 1
    assert [*reversed(strings)] == WORDS[::-1]
    with pytest.raises(IndexError):
        strings[4]


@pytest.mark.parametrize("shape", [(4,), (2, 2), (1, 4, 1)], ids=str)
def test_an_array_of_them_has_the_tensors_shape(shape: tuple[int, ...]) -> None:
    for strings in (encoded(shape=shape), Strings.of("TEXT", encoded().numpy().reshape(shape))):
        array = strings.numpy()
        assert (strings.shape, len(strings)) == (shape, 4)
        assert (array.dtype, array.shape, array.ravel().tolist()) == (np.dtype(object), shape, WORDS)
        array[:] = None  # it is the reader's own
        assert strings.numpy().ravel().tolist() == WORDS


def test_a_tensor_without_dimensions_is_one_string() -> None:
    for strings in (encoded(ENCODED[:5], ()), Strings.of("TEXT", np.array(b"a", object))):
        assert (len(strings), list(strings), strings.numpy().shape) == (1, [b"a"], ())
        assert strings.numpy().item() == b"a"


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0, 2)], ids=str)
def test_a_tensor_without_elements_takes_no_bytes(shape: tuple[int, ...]) -> None:
    for strings in (encoded(b"", shape), Strings.of("TEXT", np.empty(shape, object))):
        assert (list(strings), strings.numpy().shape, strings.encoded.nbytes) == ([], shape, 0)


def test_strings_of_an_array_in_any_order_are_in_c_order() -> None:
    array = np.array([[b"a", b"b"], [b"c", b"d"]], object)
    assert list(Strings.of("TEXT", array.T[::-1])) == [b"b", b"d", b"a", b"c"]


@pytest.mark.parametrize("element", [None, 1, 2.5, [b"a"], bytearray(b"a"), np.uint8(1)], ids=repr)
def test_what_is_no_string_is_refused_by_its_type(element: object) -> None:
    message = f"tensor 'TEXT' holds an element of type {type(element).__name__}; expected str or bytes"
    with pytest.raises(TensorTypeError, match=message) as caught:
        given(b"a", element).encoded  # noqa: B018
    assert caught.value.tensor == "TEXT"


@pytest.mark.parametrize("lie", LIES)
def test_lengths_that_lead_beyond_the_end_are_refused_by_every_reading(
    at_the_end: Callable[[bytes], Bytes], lie: str
) -> None:
    data, shape = LIES[lie]
    message = f"tensor 'TEXT' has {len(data)} bytes, but the lengths of its strings lead beyond them"
    for read in READINGS.values():
        strings = Strings.encoded_as("TEXT", at_the_end(data), shape)
        assert (strings.shape, strings.encoded.tobytes()) == (shape, data), "nothing is read before it is asked for"
        for _ in range(2):
            with pytest.raises(TensorError, match=message) as caught:
                read(strings)
            assert caught.value.tensor == "TEXT"


def test_each_string_begins_where_the_one_before_ends_so_that_none_can_overlap_another() -> None:
    overlapping = b"\x05\0\0\0\x01\0\0\0x" + b"\x01\0\0\0y"  # the first one's bytes look like a second one
    assert list(encoded(overlapping, (2,))) == [b"\x01\0\0\0x", b"y"]


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


def test_a_view_of_strings_knows_its_tensor(view: StringsView) -> None:
    assert (view.name, view.path, view.shape) == ("TEXT", "direct", (2, 2))
    assert (view.dtype, view.triton_dtype) == (np.dtype(object), "BYTES")
    assert repr(view) == "<TensorView 'TEXT' BYTES [2, 2] path=direct>"
    assert (view.writable, list(view.strings())) == (False, WORDS)
    for array in (view.numpy(), view.array):
        assert array.tolist() == [WORDS[:2], WORDS[2:]]
    assert view.attributes == BufferAttributes(MemoryType.CPU, 0, len(ENCODED) + 4, None), "with the room behind them"


def test_other_libraries_cannot_take_a_view_of_strings(view: StringsView) -> None:
    with pytest.raises(BufferError, match="'TEXT' holds strings, which DLPack has no type for; use .strings()"):
        view.__dlpack__(max_version=(1, 0))
    with pytest.raises(DeviceMemoryError):
        view.cupy()


def test_numpy_makes_an_array_of_a_view_of_strings_by_a_copy_alone() -> None:
    view = StringsView("WORDS", Strings.of("WORDS", np.array(WORDS, object)), "direct")
    assert np.asarray(view).tolist() == np.array(view).tolist() == WORDS
    with pytest.raises(ValueError, match="tensor 'WORDS' holds strings, which become an array by a copy alone"):
        view.__array__(copy=False)
