"""Strings that users pass as an input: what the model gets of them, as objects and as bytes in shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from shm_backend_utils.client.inputs.sources import StringSource, sources
from shm_backend_utils.dtypes import BYTES
from shm_backend_utils.errors import TensorError, TensorTypeError
from shm_backend_utils.model_spec import ModelSpec


def source(value: Any, dims: Sequence[int] = (-1,)) -> StringSource:
    """Return what is made of a value that is passed for an input of strings."""
    tensor = {"name": "X", "data_type": "TYPE_STRING", "dims": dims}
    made = sources(ModelSpec.from_config({"name": "model", "input": [tensor]}), {"X": value})["X"]
    assert isinstance(made, StringSource)
    return made


def objects(source: StringSource) -> npt.NDArray[np.object_]:
    """Return what travels with a request."""
    target: npt.NDArray[np.object_] = np.empty(source.shape, object)
    source.write_to(target)
    return target


def bytes_of(source: StringSource) -> bytes:
    """Return what is written into shared memory, once it is known that what follows is left alone."""
    target = np.full(source.byte_size + 10, 255, np.uint8)
    source.write_to(target)
    assert (target[source.byte_size :] == 255).all()
    return target[: source.byte_size].tobytes()


@pytest.mark.parametrize(
    "value",
    [
        ["a", "bc", ""],
        ["ü", "日本語", "\N{PILE OF POO}"],
        [b"a", b"\xff\x00\xfe"],
        [b"ends with nothing\x00"],
        ["ends with nothing\x00"],
        ["text", b"bytes", b"\xff"],
        np.array(["a", "bc"]),
        np.array([b"a", b"bc"]),
        np.array(["a", b"\x00"], object),
    ],
    ids=repr,
)
def test_strings_arrive_as_they_are(value: Any) -> None:
    made = source(value)
    assert made.dtype is BYTES
    assert objects(made).tolist() == list(value)


@pytest.mark.parametrize(
    ("value", "dims", "expected"),
    [
        (["a", b"bc"], (-1,), b"\x01\0\0\0a\x02\0\0\0bc"),
        ("ü", (1, 1), b"\x02\0\0\0\xc3\xbc"),
        (["", b"\0"], (-1,), b"\0\0\0\0\x01\0\0\0\0"),
        ([], (-1,), b""),
        (np.empty((0, 3), object), (-1, 3), b""),
        (np.array("word", object), (), b"\x04\0\0\0word"),
        (np.array([["a", "x"], ["b", "y"]]).T[:1], (-1, -1), b"\x01\0\0\0a\x01\0\0\0b"),
        ([np.array(["a"]), np.array(["b"])], (-1, 1), b"\x01\0\0\0a\x01\0\0\0b"),
        (np.array(["a", "b"], ">U1"), (-1,), b"\x01\0\0\0a\x01\0\0\0b"),
    ],
    ids=["both", "one", "empty strings", "none", "no rows", "0-d", "transposed", "rows", "big-endian"],
)
def test_strings_are_written_as_lengths_and_bytes(value: Any, dims: tuple[int, ...], expected: bytes) -> None:
    assert bytes_of(source(value, dims)) == expected


@pytest.mark.parametrize("length", [0, 59, 60, 10**6])
def test_strings_need_room_for_their_lengths_and_bytes_and_no_more(length: int) -> None:
    made = source([b"x" * length, "ü"])
    assert made.byte_size == made.encoded.nbytes == 4 + length + 4 + 2
    assert objects(source("word", (1, 1))).tolist() == [["word"]]


@pytest.mark.parametrize("value", [1, True, [2.5], [["word"], [3]]], ids=str)
def test_numbers_for_an_input_of_strings_are_refused(value: Any) -> None:
    with pytest.raises(TensorTypeError, match="'X' holds .*, which is no value of TYPE_STRING"):
        source(value)


@pytest.mark.parametrize("element", [None, 1, 2.5, ["word"], bytearray(b"word"), np.float32(1)], ids=repr)
def test_an_array_of_objects_with_one_that_is_no_string_is_refused(element: Any) -> None:
    array = np.array(["word", None], object)
    array[1] = element
    with pytest.raises(TensorTypeError, match="'X' holds an element of type .*; expected str or bytes"):
        source(array)


@pytest.mark.parametrize(
    "value", [["\ud800"], np.array(["\ud800"]), ["fine", "\udfff"]], ids=["list", "array", "second"]
)
def test_text_that_has_no_utf_8_is_refused_by_the_inputs_name(value: Any) -> None:
    with pytest.raises(TensorError, match="'X'"):
        source(value)
