"""Batches that are larger than the model takes: several requests, one result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from shm_backend_utils.client import InferenceError, PoolOptions
from shm_backend_utils.client.options import PathName
from shm_backend_utils.errors import BatchSizeError

from .eventually import all_memory_comes_back
from .flavours import AnyClient, Flavour
from .mapped import lies_in_shared_memory

MOST_ROWS = 4  # that the model takes at once


def rows(count: int) -> npt.NDArray[np.float32]:
    return np.random.default_rng(count).random((count, 4), np.float32)


@pytest.mark.parametrize("count", [1, MOST_ROWS, MOST_ROWS + 1, 2 * MOST_ROWS, 99])
def test_a_batch_of_any_size_is_doubled(any_client: AnyClient, path: PathName, count: int) -> None:
    with any_client.infer("rows", {"X": rows(count)}, split=True, path=path) as result:
        assert result.path == path
        np.testing.assert_array_equal(result["DOUBLED"], rows(count) * 2)
        np.testing.assert_array_equal(result["REPEATED"], rows(count))


@pytest.mark.parametrize(("count", "requests"), [(1, 1), (MOST_ROWS, 1), (MOST_ROWS + 1, 2), (99, 25)])
def test_it_is_as_many_requests_as_are_needed(any_client: AnyClient, path: PathName, count: int, requests: int) -> None:
    with any_client.infer("rows", {"X": rows(count)}, outputs=["RUNS"], split=True, path=path) as result:
        assert len(np.unique(result["RUNS"])) == requests


def test_the_result_is_one_view_of_shared_memory(any_client: AnyClient) -> None:
    with any_client.infer("rows", {"X": rows(99)}, outputs=["DOUBLED"], split=True, path="direct") as result:
        assert result["DOUBLED"].flags.c_contiguous
        assert lies_in_shared_memory(result["DOUBLED"])
        assert any_client.stats().slots_held == 1
    all_memory_comes_back(any_client)


def test_a_split_result_outlives_later_calls(any_client: AnyClient, path: PathName) -> None:
    first = any_client.infer("rows", {"X": rows(9)}, outputs=["DOUBLED"], split=True, path=path)["DOUBLED"]
    any_client.infer("rows", {"X": rows(99)}, outputs=["DOUBLED"], split=True, path=path).release()
    np.testing.assert_array_equal(first, rows(9) * 2)


@pytest.mark.parametrize(
    "outputs",
    [["DOUBLED"], {"DOUBLED": None}, {"DOUBLED": 99 * 16}, {"DOUBLED": ((99, 4), np.float32)}],
    ids=["name", "no hint", "bytes", "shape and dtype"],
)
def test_hints_are_for_the_whole(any_client: AnyClient, path: PathName, outputs: Any) -> None:
    with any_client.infer("rows", {"X": rows(99)}, outputs=outputs, split=True, path=path) as result:
        assert list(result) == ["DOUBLED"]
        np.testing.assert_array_equal(result["DOUBLED"], rows(99) * 2)


def test_outputs_of_open_size_are_put_together(any_client: AnyClient, path: PathName) -> None:
    for _ in range(2):  # the second time their size is known
        with any_client.infer("rows", {"X": rows(9)}, parameters={"times": 5}, split=True, path=path) as result:
            np.testing.assert_array_equal(result["REPEATED"], np.tile(rows(9), (1, 5)))


def test_a_hint_for_an_output_of_open_size_makes_it_one_view(any_client: AnyClient) -> None:
    hints = {"REPEATED": ((10, 20), np.float32)}
    with any_client.infer(
        "rows", {"X": rows(10)}, outputs=hints, parameters={"times": 5}, split=True, path="direct"
    ) as result:
        np.testing.assert_array_equal(result["REPEATED"], np.tile(rows(10), (1, 5)))
        assert lies_in_shared_memory(result["REPEATED"])


@pytest.mark.parametrize(
    "cut",
    [list, lambda array: [array[:7], array[7:8], array[8:]], lambda array: array.astype(">f4"), np.asfortranarray],
    ids=["rows", "batches", "big-endian", "Fortran order"],
)
def test_inputs_of_any_kind_are_split(
    any_client: AnyClient, path: PathName, cut: Callable[[npt.NDArray[Any]], Any]
) -> None:
    with any_client.infer("rows", {"X": cut(rows(19))}, outputs=["DOUBLED"], split=True, path=path) as result:
        np.testing.assert_array_equal(result["DOUBLED"], rows(19) * 2)


@pytest.mark.parametrize("failing_row", [0, 9, 18])
def test_a_part_that_fails_fails_the_call_and_nothing_after_it(
    any_client: AnyClient, path: PathName, failing_row: int
) -> None:
    x = rows(19)
    x[failing_row] = -1
    with pytest.raises(InferenceError, match="a row begins below zero"):
        any_client.infer("rows", {"X": x}, split=True, path=path)
    all_memory_comes_back(any_client)
    assert any_client.stats().failures == 1
    with any_client.infer("rows", {"X": rows(19)}, split=True, path=path) as result:
        np.testing.assert_array_equal(result["DOUBLED"], rows(19) * 2)


def test_all_parts_may_fail(any_client: AnyClient, path: PathName) -> None:
    with pytest.raises(InferenceError, match="a row begins below zero"):
        any_client.infer("rows", {"X": -rows(19)}, split=True, path=path)
    any_client.infer("rows", {"X": rows(19)}, split=True, path=path).release()


def test_without_split_a_batch_that_is_too_large_is_an_error_that_names_it(
    any_client: AnyClient, path: PathName
) -> None:
    with pytest.raises(BatchSizeError, match="a batch of 5, but model 'rows' takes 1 to 4; split=True sends several"):
        any_client.infer("rows", {"X": rows(5)}, path=path)


def test_a_batch_of_nothing_is_an_error(any_client: AnyClient, path: PathName) -> None:
    with pytest.raises(BatchSizeError, match="a batch of 0"):
        any_client.infer("rows", {"X": np.empty((0, 4), np.float32)}, split=True, path=path)


def test_a_model_without_batches_is_called_once(any_client: AnyClient, path: PathName) -> None:
    x = np.arange(99, dtype=np.float32)
    with any_client.infer("identity", {"INPUT0": x}, split=True, path=path) as result:
        np.testing.assert_array_equal(result["OUTPUT0"], x)


@pytest.mark.parametrize("path", ["direct", "triton-shm"])
def test_parts_wait_for_each_other_where_memory_is_scarce(flavour: Flavour, path: PathName) -> None:
    with (
        flavour.client(pool=PoolOptions(max_bytes=150_000)) as client,
        client.infer("rows", {"X": rows(99)}, outputs=["DOUBLED"], split=True, path=path) as result,
    ):
        np.testing.assert_array_equal(result["DOUBLED"], rows(99) * 2)


def test_the_options_go_with_every_part(any_client: AnyClient, path: PathName) -> None:
    with any_client.infer("rows", {"X": rows(9)}, parameters={"times": 2}, split=True, path=path) as result:
        assert result["REPEATED"].shape == (9, 8)
