"""Batches of strings that are larger than the model's: several requests, one result."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest

from shm_backend_utils.client import InferenceError, ShmClient
from shm_backend_utils.client.options import PathName
from shm_backend_utils.errors import BatchSizeError

from .eventually import all_memory_comes_back
from .flavours import AnyClient
from .in_band import EVERY_PATH_OF_STRINGS

every_path = pytest.mark.parametrize("path", EVERY_PATH_OF_STRINGS)

MOST_ROWS: Final = 4  # that the model takes at once


def words(count: int) -> npt.NDArray[np.object_]:
    """Return rows of two words, each longer than the one before."""
    return np.array([[b"a" * row, "ü".encode() * row] for row in range(count)], object).reshape(count, 2)


def loud(count: int) -> list[list[bytes]]:
    return [[word.upper() for word in row] for row in words(count)]


def numbers(*of_each_row: int) -> npt.NDArray[np.int32]:
    return np.array(of_each_row, np.int32)[:, np.newaxis]


@every_path
@pytest.mark.parametrize("count", [MOST_ROWS, MOST_ROWS + 1, 19])
def test_a_batch_of_any_size_comes_back_whole(any_client: AnyClient, path: PathName, count: int) -> None:
    with any_client.infer("word_rows", {"WORDS": words(count)}, outputs=["LOUD"], split=True, path=path) as result:
        assert result.path == path
        assert result["LOUD"].tolist() == loud(count)


@every_path
@pytest.mark.parametrize(
    "value", [list(words(9)), [words(9)[:5], words(9)[5:]], words(9).tolist()], ids=["rows", "parts", "lists"]
)
def test_strings_may_be_given_in_pieces(client: ShmClient, path: PathName, value: Any) -> None:
    with client.infer("word_rows", {"WORDS": value}, outputs=["LOUD"], split=True, path=path) as result:
        assert result["LOUD"].tolist() == loud(9)


@every_path
@pytest.mark.parametrize("hint", [None, 0, 50, 1000, ((9, 1), "S20"), ((9, 1), object)], ids=str)
def test_outputs_of_strings_are_put_together_whether_they_have_room_or_not(
    client: ShmClient, path: PathName, hint: Any
) -> None:
    lengths = numbers(1, 20, 3, 40, 0, 0, 0, 0, 7)
    for _ in range(2):  # the second time their size is known
        with client.infer(
            "word_rows", {"NUMBERS": lengths}, outputs={"SPELLED": hint}, split=True, path=path
        ) as result:
            assert result["SPELLED"].tolist() == [[b"x" * length] for length in lengths.flat]
    all_memory_comes_back(client)


@every_path
def test_strings_and_numbers_are_split_alike(client: ShmClient, path: PathName) -> None:
    inputs = {"WORDS": words(9), "NUMBERS": numbers(*range(9))}
    with client.infer("word_rows", inputs, split=True, path=path) as result:
        assert result["LOUD"].tolist() == loud(9)
        assert result["SPELLED"].tolist() == [[b"x" * length] for length in range(9)]


@every_path
def test_a_part_that_fails_fails_the_call(client: ShmClient, path: PathName) -> None:
    with pytest.raises(InferenceError, match="no input 'NUMBERS'"):
        client.infer("word_rows", {"WORDS": words(9)}, split=True, path=path)
    all_memory_comes_back(client)


@every_path
def test_without_split_a_batch_that_is_too_large_is_refused(client: ShmClient, path: PathName) -> None:
    with pytest.raises(BatchSizeError, match="a batch of 5, but model 'word_rows' takes 1 to 4"):
        client.infer("word_rows", {"WORDS": words(5)}, path=path)
