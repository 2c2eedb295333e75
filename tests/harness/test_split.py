"""Batches that are larger than the model takes: several requests, one result."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from shm_backend_utils.client import InferenceError, PoolOptions
from shm_backend_utils.client.options import PathName
from shm_backend_utils.errors import BatchSizeError
from tests.e2e.eventually import all_memory_comes_back
from tests.e2e.flavours import AnyClient, Flavour

MODELS = ("rows", "word_rows")
MOST_ROWS = 4  # that the model takes at once


def rows(count: int) -> npt.NDArray[np.float32]:
    return np.random.default_rng(count).random((count, 4), np.float32)


@pytest.mark.parametrize(("count", "requests"), [(1, 1), (MOST_ROWS, 1), (MOST_ROWS + 1, 2), (99, 25)])
def test_a_batch_of_any_size_is_as_many_requests_as_it_needs(
    client: AnyClient, path: PathName, count: int, requests: int
) -> None:
    with client.infer("rows", {"X": rows(count)}, split=True, path=path) as result:
        assert result.path == path
        assert len(np.unique(result["RUNS"])) == requests
        np.testing.assert_array_equal(result["REPEATED"], rows(count))
        doubled = result["DOUBLED"]
    client.infer("rows", {"X": rows(98)}, split=True, path=path).release()
    np.testing.assert_array_equal(doubled, rows(count) * 2)


@pytest.mark.parametrize("hint", [None, 99 * 16, ((99, 4), np.float32)], ids=["no hint", "bytes", "shape and dtype"])
def test_hints_are_for_the_whole(client: AnyClient, path: PathName, hint: Any) -> None:
    with client.infer("rows", {"X": rows(99)}, outputs={"DOUBLED": hint}, split=True, path=path) as result:
        assert list(result) == ["DOUBLED"]
        np.testing.assert_array_equal(result["DOUBLED"], rows(99) * 2)


@pytest.mark.parametrize("failing_row", [0, 9, 18])
def test_a_part_that_fails_fails_the_call_and_nothing_after_it(
    client: AnyClient, path: PathName, failing_row: int
) -> None:
    x = rows(19)
    x[failing_row] = -1
    with pytest.raises(InferenceError, match="a row begins below zero"):
        client.infer("rows", {"X": x}, split=True, path=path)
    all_memory_comes_back(client)
    assert client.stats().failures == 1
    with client.infer("rows", {"X": rows(19)}, split=True, path=path) as result:
        np.testing.assert_array_equal(result["DOUBLED"], rows(19) * 2)


def test_a_batch_of_nothing_or_too_large_without_split_is_an_error(client: AnyClient, path: PathName) -> None:
    with pytest.raises(BatchSizeError, match="a batch of 5, but model 'rows' takes 1 to 4; .*split=True"):
        client.infer("rows", {"X": rows(5)}, path=path)
    with pytest.raises(BatchSizeError, match="a batch of 0"):
        client.infer("rows", {"X": rows(0)}, split=True, path=path)


@pytest.mark.parametrize("path", ["direct", "triton-shm"])
def test_parts_wait_for_each_other_where_memory_is_scarce(flavour: Flavour, path: PathName) -> None:
    with (
        flavour.client(pool=PoolOptions(max_bytes=150_000)) as client,
        client.infer("rows", {"X": rows(99)}, outputs=["DOUBLED"], split=True, path=path) as result,
    ):
        np.testing.assert_array_equal(result["DOUBLED"], rows(99) * 2)


@pytest.mark.parametrize("hint", [None, 0, 50, 1000, ((9, 1), "S20"), ((9, 1), object)], ids=str)
def test_strings_come_back_whole_whether_they_have_room_or_not(client: AnyClient, path: PathName, hint: Any) -> None:
    lengths = np.array([[1], [20], [3], [40], [0], [0], [0], [0], [7]], np.int32)
    words = np.array([[b"a" * row, "ü".encode() * row] for row in range(9)], object)
    for _ in range(2):  # the second time their size is known
        inputs = {"NUMBERS": lengths, "WORDS": words}
        with client.infer("word_rows", inputs, outputs={"SPELLED": hint, "LOUD": None}, split=True, path=path) as found:
            assert found["SPELLED"].tolist() == [[b"x" * length] for length in lengths.flat]
            assert found["LOUD"].tolist() == [[word.upper() for word in row] for row in words]
    all_memory_comes_back(client)
