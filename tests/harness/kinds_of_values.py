"""Every kind of value that users give for a tensor: what arrives of it, or why it is refused."""

from __future__ import annotations

import array
import enum
import importlib.util
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from shm_backend_utils import dtypes

Array = npt.NDArray[Any]


class Kind(NamedTuple):
    """A kind of value for a tensor of two dimensions, the first of which is that of batches."""

    make: Callable[[], Any]
    arrives: Array | str


ROWS: Final = np.array([[0, -1, 2, 3], [4, 5.0, -6, 7], [8, 9, 10, -11]], np.float32)
MASKED: Final = np.ma.MaskedArray(ROWS, ROWS == 5)
BF16: Final = dtypes.BF16.numpy
WORDS: Final = np.array([[b"ab", b"\xc3\xbc"], [b"", b"d\xff"], [b"e", b"0"]], object)
TEXTS: Final = [["ab", "ü"], ["", "d"], ["e", "0"]]
TEXTS_ARRIVE: Final = np.array([[text.encode() for text in row] for row in TEXTS], object)


class Exporter:
    """Has DLPack's two methods, and nothing else."""

    def __init__(self, array: Array) -> None:
        self._array = array

    def __dlpack__(self, **named: Any) -> Any:
        return self._array.__dlpack__(**named)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._array.__dlpack_device__()


class Described:
    """Has __array_interface__, and nothing else."""

    def __init__(self, array: Array) -> None:
        self._array = array
        self.__array_interface__ = array.__array_interface__


class Masked(Described):
    """Describes which of its elements are valid."""

    def __init__(self, array: Array) -> None:
        super().__init__(array)
        self.__array_interface__ = {**array.__array_interface__, "mask": Described(array > 0)}


class Convertible:
    """Has __array__, and nothing else: so have columns of pandas."""

    def __init__(self, array: Array) -> None:
        self._array = array

    def __array__(self, *arguments: Any, **named: Any) -> Array:
        return self._array


class Unreadable:
    """A column that is no array."""

    def __array__(self, *arguments: Any, **named: Any) -> Array:
        raise LookupError("it is on a tape")


class Word(str, enum.Enum):
    """A kind of str that prints as something else."""

    AB = "ab"


def spread(array: Array) -> Array:
    """Return an equal array whose elements do not lie side by side."""
    wide: Array = np.zeros((array.shape[0] * 2, array.shape[1] * 3), array.dtype)
    view = wide[::2, ::3]
    view[:] = array
    return view


def read_only(array: Array) -> Array:
    copy: Array = array.copy()
    copy.flags.writeable = False
    return copy


def of_numpy_2(texts: Any) -> Array:
    """Return strings as only NumPy 2 has them; as objects, where it has not."""
    kind: Any = getattr(getattr(np, "dtypes", None), "StringDType", lambda: object)
    array: Array = np.array(texts, kind())
    return array


WHICH: Final = "which TYPE_"
NUMBERS: Final = {
    "array": lambda: ROWS,
    "Fortran order": lambda: np.asfortranarray(ROWS),
    "not contiguous": lambda: spread(ROWS),
    "reversed": lambda: ROWS[::-1].copy()[::-1],
    "big-endian": lambda: ROWS.astype(">f4"),
    "read-only": lambda: read_only(ROWS),
    "transposed": lambda: ROWS.T.copy().T,
    "matrix": lambda: np.asmatrix(ROWS),
    "masked, with no element that is": lambda: np.ma.MaskedArray(ROWS),
    "list of rows": lambda: list(ROWS),
    "list of batches": lambda: [ROWS[:1], ROWS[1:]],
    "list of DLPack objects": lambda: [Exporter(row) for row in ROWS],
    "DLPack object": lambda: Exporter(ROWS),
    "__array_interface__": lambda: Described(ROWS),
    "__array__": lambda: Convertible(ROWS),
    "nested lists of numbers": ROWS.tolist,
    "nested lists of integers": lambda: ROWS.astype(int).tolist(),
    "memoryview": lambda: ROWS.data,
    "list of array.array": lambda: [array.array("f", row) for row in ROWS],
}


KINDS: Final[dict[str, dict[str, Kind]]] = {
    "FP32": {
        **{name: Kind(make, ROWS) for name, make in NUMBERS.items()},
        "large array": Kind(lambda: np.tile(ROWS, (1, 8192)), np.tile(ROWS, (1, 8192))),
        "no columns": Kind(lambda: ROWS[:, :0], ROWS[:, :0]),
        "broadcast": Kind(lambda: np.broadcast_to(ROWS[:1], ROWS.shape), np.tile(ROWS[:1], (3, 1))),
        "one number": Kind(lambda: 7, np.full((1, 1), 7, np.float32)),
        "masked": Kind(lambda: MASKED, "has 1 masked elements, .*: give the array's .filled"),
        "list of masked rows": Kind(lambda: [ROWS[0], *MASKED[1:]], "has 1 masked elements"),
        "masked interface": Kind(lambda: Masked(ROWS), "is a .*Masked that cannot be read: it has a mask; give"),
        "masked number": Kind(lambda: [[1.0, np.ma.masked]], "has 1 masked elements"),
        "another dtype": Kind(lambda: ROWS.astype(np.float64), r"is FP64, but .*; convert it by .astype\('float32'\)"),
        "complex": Kind(lambda: ROWS * 1j, "has NumPy dtype complex64; Triton has .*: convert it"),
        "record": Kind(lambda: np.zeros((3, 4), [("mask", "?")]).view(np.recarray), "has NumPy dtype .*: convert it"),
        "objects": Kind(lambda: ROWS.astype(object), "is BYTES, but .*; objects are taken for strings; convert it"),
        "one dimension": Kind(lambda: ROWS[0], r"has shape \[4\], but .*: one row has shape \[1, 4\]"),
        "ragged": Kind(lambda: [[1.0], [2.0, 3.0]], "is a nested list that is not rectangular"),
        "list of rows that differ": Kind(lambda: [ROWS[0], ROWS[1, :2]], "is a list of arrays of shapes"),
        "list of dtypes that differ": Kind(lambda: [ROWS[0], ROWS[1].astype(int)], "is a list of arrays of dtypes"),
        "a number too large": Kind(lambda: [[2**24 + 1]], f"holds 16777217, {WHICH}FP32 cannot hold; pass numbers"),
        "text": Kind(lambda: "1.5", f"holds '1.5', {WHICH}FP32 cannot hold; pass numbers that fit, or an array"),
        "nothing": Kind(lambda: None, f"holds None, {WHICH}FP32 cannot hold; .*, or leave the tensor out"),
        "generator": Kind(lambda: (row for row in ROWS), f"holds an object of type generator, {WHICH}FP32 cannot hold"),
        "capsule": Kind(ROWS.__dlpack__, f"holds an object of type PyCapsule, {WHICH}FP32 cannot hold; .* an array"),
        "unreadable": Kind(Unreadable, "is a .*Unreadable that cannot be read: it is on a tape; give a dense array"),
    },
    **{
        name: {
            "array": Kind(lambda dtype=row.numpy: ROWS.astype(np.int8).astype(dtype), ROWS.astype(np.int8)),  # type: ignore[misc]
            "big-endian": Kind(
                lambda dtype=row.numpy: ROWS.astype(np.int8).astype(dtype.newbyteorder(">")),  # type: ignore[misc]
                ROWS.astype(np.int8),
            ),
        }
        for name, row in dtypes.BY_NAME.items()
        if name not in ("FP32", "BYTES")
    },
    "BYTES": {
        "lists of bytes": Kind(WORDS.tolist, WORDS),
        "lists of str": Kind(lambda: TEXTS, TEXTS_ARRIVE),
        "objects": Kind(lambda: WORDS, WORDS),
        "objects in another order": Kind(lambda: WORDS.T.copy().T, WORDS),
        "zeros at the end": Kind(lambda: [[b"a\0", "\0"]], np.array([[b"a\0", b"\0"]], object)),
        "nothing": Kind(lambda: WORDS[:, :0], WORDS[:, :0]),
        "array of U": Kind(lambda: np.array(TEXTS), TEXTS_ARRIVE),
        "array of S": Kind(lambda: np.array(WORDS.tolist(), "S2"), WORDS),
        "StringDType": Kind(lambda: of_numpy_2(TEXTS), TEXTS_ARRIVE),
        "lists of np.bytes_": Kind(lambda: [list(row) for row in np.array(WORDS.tolist())], WORDS),
        "objects of np.bytes_": Kind(lambda: np.array([[np.bytes_(b"ab")]], object), WORDS[:1, :1]),
        "one np.bytes_": Kind(lambda: np.bytes_(b"ab"), WORDS[:1, :1]),
        "a kind of str": Kind(lambda: [[Word.AB]], WORDS[:1, :1]),
        "list of rows": Kind(lambda: list(WORDS), WORDS),
        "__array__": Kind(lambda: Convertible(WORDS), WORDS),
        "no UTF-8": Kind(lambda: [["\ud800"]], "holds text that UTF-8 cannot encode"),
        "a number": Kind(lambda: [["a", 1]], f"holds 1, {WHICH}STRING cannot hold; pass str or bytes, or an array"),
        "a hole": Kind(lambda: np.array([["a", None]], object), "an element of type NoneType; expected str or bytes"),
        "bytearray": Kind(lambda: np.array([[bytearray(b"a"), 0]], object)[:, :1], "an element of type bytearray; exp"),
        "numbers": Kind(lambda: ROWS, "is FP32, but .*; pass strings: a list, or an array of objects"),
        "masked": Kind(lambda: np.ma.MaskedArray(WORDS, WORDS == b"e"), "has 1 masked elements"),
    },
}
KINDS["UINT8"]["bytearrays"] = Kind(lambda: [bytearray(b"ab")], np.array([[97, 98]]))
KINDS["BOOL"]["lists"] = Kind(lambda: [[True, np.False_]], np.array([[True, False]]))
KINDS["BOOL"]["lists of integers"] = Kind(lambda: [[1]], f"holds 1, {WHICH}BOOL cannot hold")
KINDS["BF16"]["lists"] = Kind(lambda: [[1, 0.5]], np.array([[1, 0.5]]))
KINDS["FP64"]["a number too large"] = Kind(lambda: [[np.longdouble("1e4000")]], f"holds .*, {WHICH}FP64 cannot hold")
KINDS["INT64"]["date"] = Kind(lambda: [[np.datetime64(1, "s")]], f"holds .*, {WHICH}INT64 cannot hold")
if BF16.name == "bfloat16":
    import ml_dtypes

    KINDS["INT8"]["4 bits"] = Kind(lambda: ROWS.astype(ml_dtypes.int4), "has NumPy dtype int4; .*: convert it")


def torch() -> Any:
    """Return PyTorch, which takes seconds to import, and time of every test in a process that has it."""
    return importlib.import_module("torch")


def negated() -> Any:
    return torch().complex(torch().ones(3, 4), torch().ones(3, 4)).conj().imag


if importlib.util.find_spec("torch") is not None:
    KINDS["FP32"] |= {
        "tensor": Kind(lambda: torch().from_numpy(ROWS.copy()), ROWS),
        "list of tensors": Kind(lambda: list(torch().from_numpy(ROWS.copy())), ROWS),
        "tensor with a gradient": Kind(
            lambda: torch().ones(3, 4, requires_grad=True), r"cannot be read: .*\.detach\(\)"
        ),
        "negated tensor": Kind(negated, r"with the wrong sign .*; give value.resolve_neg\(\)"),
        "conjugated tensor": Kind(
            lambda: torch().ones(3, 4, dtype=torch().complex64).conj(), r"cannot be read: .*\.resolve_conj\(\)"
        ),
        "tensor without memory": Kind(lambda: torch().empty(3, 4, device="meta"), "cannot be read: .* give a dense"),
        "sparse tensor": Kind(lambda: torch().eye(4).to_sparse(), r"cannot be read: .*\.to_dense\(\)"),
    }
    KINDS["BF16"]["tensor"] = Kind(lambda: torch().from_numpy(ROWS.copy()).bfloat16(), ROWS)
    KINDS["BOOL"]["tensor"] = Kind(lambda: torch().from_numpy(ROWS > 0), ROWS > 0)
