"""Which outputs come back, how much room they get, and what happens to those that need more."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from shm_backend_utils.client import OutputRoomError
from shm_backend_utils.client.options import PathName

from .flavours import AnyClient

X = np.arange(5, dtype=np.float32)
THRICE = np.tile(X, 3)
TIMES = {"times": 3}


def rows(count: int) -> npt.NDArray[np.float32]:
    return np.arange(4 * count, dtype=np.float32).reshape(count, 4)


def runs_so_far(client: AnyClient) -> int:
    """Return how often `repeat` has run, this time included."""
    with client.infer("repeat", {"X": X}, outputs=["RUNS"], parameters=TIMES) as result:
        return int(result["RUNS"][0])


def test_all_outputs_come_back_if_none_is_named(any_client: AnyClient, path: PathName) -> None:
    with any_client.infer("repeat", {"X": X}, parameters=TIMES, path=path) as result:
        assert sorted(result) == ["RUNS", "Y"]


@pytest.mark.parametrize(
    "outputs",
    [["Y"], ("Y",), {"Y": None}, {"Y": THRICE.nbytes}, {"Y": (THRICE.shape, np.float32)}, {"Y": ((3, 5), "f4")}],
    ids=["list", "tuple", "no hint", "bytes", "shape and dtype", "another shape of that size"],
)
def test_only_the_named_outputs_come_back(any_client: AnyClient, path: PathName, outputs: Any) -> None:
    with any_client.infer("repeat", {"X": X}, outputs=outputs, parameters=TIMES, path=path) as result:
        assert list(result) == ["Y"]
        np.testing.assert_array_equal(result["Y"], THRICE)


@pytest.mark.parametrize("hint", [THRICE.nbytes, (THRICE.shape, np.float32), 10 * THRICE.nbytes])
def test_an_output_lies_in_the_room_that_was_hinted_at(any_client: AnyClient, hint: Any) -> None:
    with any_client.infer("repeat", {"X": X}, outputs={"Y": hint}, parameters=TIMES) as result:
        assert result.overflowed == {}
        assert result["Y"].shape == THRICE.shape


@pytest.mark.parametrize("hint", [None, 0, 4, ((14,), np.float32)], ids=str)
def test_an_output_that_finds_no_room_comes_back_in_the_same_response(any_client: AnyClient, hint: Any) -> None:
    with any_client.infer("repeat", {"X": X}, outputs={"Y": hint}, parameters=TIMES) as result:
        assert result.overflowed == {"Y": THRICE.nbytes}
        np.testing.assert_array_equal(result["Y"], THRICE)


def test_a_model_whose_output_finds_no_room_runs_once(any_client: AnyClient) -> None:
    before = runs_so_far(any_client)
    with any_client.infer("repeat", {"X": X}, parameters=TIMES) as result:
        assert result.overflowed
        assert result["RUNS"][0] == before + 1
    assert runs_so_far(any_client) == before + 2


def test_the_next_call_has_room(any_client: AnyClient) -> None:
    any_client.infer("repeat", {"X": X}, outputs=["Y"], parameters=TIMES).release()
    with any_client.infer("repeat", {"X": X}, outputs=["Y"], parameters=TIMES) as result:
        assert result.overflowed == {}
        np.testing.assert_array_equal(result["Y"], THRICE)


def test_an_output_that_outgrows_what_was_learned_is_learned_anew(any_client: AnyClient) -> None:
    for times in (1, 10, 100):
        with any_client.infer("repeat", {"X": X}, outputs=["Y"], parameters={"times": times}) as first:
            assert first.overflowed == {"Y": times * X.nbytes}
        with any_client.infer("repeat", {"X": X}, outputs=["Y"], parameters={"times": times}) as second:
            assert second.overflowed == {}


def test_what_was_learned_from_one_row_is_room_enough_for_more(any_client: AnyClient) -> None:
    any_client.infer("rows", {"X": rows(1)}, parameters=TIMES).release()
    for count in (1, 2, 4):
        with any_client.infer("rows", {"X": rows(count)}, parameters=TIMES) as result:
            assert result.overflowed == {}
            np.testing.assert_array_equal(result["REPEATED"], np.tile(rows(count), (1, 3)))


def test_what_was_learned_from_many_rows_is_no_more_than_one_row_needs(any_client: AnyClient) -> None:
    any_client.infer("rows", {"X": rows(4)}, parameters={"times": 5000}).release()
    with any_client.infer("rows", {"X": rows(1)}, parameters={"times": 5000}) as result:
        assert result.overflowed == {}
        assert any_client.stats().pool_bytes < 4 * result["REPEATED"].nbytes


@pytest.mark.parametrize("path", ["triton-shm", "inline"])
def test_without_a_hint_an_output_of_open_size_comes_back_on_every_path(any_client: AnyClient, path: PathName) -> None:
    for times in (1, 20):
        with any_client.infer("repeat", {"X": X}, outputs=["Y"], parameters={"times": times}, path=path) as result:
            assert result.overflowed == {}
            np.testing.assert_array_equal(result["Y"], np.tile(X, times))


def test_a_hint_that_is_too_small_is_an_error_where_the_output_can_come_back_no_other_way(
    any_client: AnyClient,
) -> None:
    with pytest.raises(OutputRoomError, match="needs more bytes than its hint gave it.*give a larger hint, or none"):
        any_client.infer("repeat", {"X": X}, outputs={"Y": 4}, parameters=TIMES, path="triton-shm")
    with any_client.infer("repeat", {"X": X}, outputs={"Y": 60}, parameters=TIMES, path="triton-shm") as result:
        np.testing.assert_array_equal(result["Y"], THRICE)


def test_a_hint_does_not_matter_inline(any_client: AnyClient) -> None:
    with any_client.infer("repeat", {"X": X}, outputs={"Y": 4}, parameters=TIMES, path="inline") as result:
        np.testing.assert_array_equal(result["Y"], THRICE)


def test_a_prepared_call_whose_output_finds_no_room_has_some_the_next_time(any_client: AnyClient) -> None:
    with any_client.prepare("repeat", {"X": ((5,), np.float32)}, outputs={"Y": 4}, parameters=TIMES) as call:
        for value in (1, 2):
            call.inputs["X"][:] = value
            with call.infer() as result:
                assert result.overflowed == ({"Y": THRICE.nbytes} if value == 1 else {})
                assert result["Y"].tolist() == [value] * 15
