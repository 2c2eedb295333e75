"""Which outputs come back, how much room they get, and what happens to those that need more."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from shm_backend_utils.client import Result
from shm_backend_utils.client.errors import OutputRoomError
from shm_backend_utils.client.options import PathName
from tests.e2e.flavours import AnyClient
from tests.e2e.in_band import NUMBERS
from tests.e2e.own_regions import lies_in_shared_memory

MODELS = ("counting", "every_dtype", "repeat", "rows")
X = np.arange(5, dtype=np.float32)
THRICE = np.tile(X, 3)
TIMES = {"times": 3}
COUNTING = {"COUNT_AND_DELAY_US": ((2,), np.int64)}


def rows(count: int) -> npt.NDArray[np.float32]:
    return np.arange(4 * count, dtype=np.float32).reshape(count, 4)


def runs_so_far(client: AnyClient) -> int:
    """Return how often `repeat` has run, this time included."""
    with client.infer("repeat", {"X": X}, outputs=["RUNS"], parameters=TIMES) as result:
        return int(result["RUNS"][0])


def test_all_outputs_come_back_if_none_is_named(client: AnyClient, path: PathName) -> None:
    with client.infer("repeat", {"X": X}, parameters=TIMES, path=path) as result:
        assert sorted(result) == ["RUNS", "Y"]


@pytest.mark.parametrize(
    "outputs",
    [["Y"], ("Y",), {"Y": None}, {"Y": THRICE.nbytes}, {"Y": (THRICE.shape, np.float32)}, {"Y": ((3, 5), "f4")}],
    ids=["list", "tuple", "no hint", "bytes", "shape and dtype", "another shape of that size"],
)
def test_only_the_named_outputs_come_back(client: AnyClient, path: PathName, outputs: Any) -> None:
    with client.infer("repeat", {"X": X}, outputs=outputs, parameters=TIMES, path=path) as result:
        assert list(result) == ["Y"]
        np.testing.assert_array_equal(result["Y"], THRICE)


@pytest.mark.parametrize("hint", [THRICE.nbytes, (THRICE.shape, np.float32), 10 * THRICE.nbytes])
def test_an_output_lies_in_the_room_that_was_hinted_at(client: AnyClient, hint: Any) -> None:
    with client.infer("repeat", {"X": X}, outputs={"Y": hint}, parameters=TIMES) as result:
        assert result.overflowed == {}
        assert result["Y"].shape == THRICE.shape


@pytest.mark.parametrize("hint", [None, 0, 4, ((14,), np.float32)], ids=str)
def test_an_output_that_finds_no_room_comes_back_in_the_same_response(client: AnyClient, hint: Any) -> None:
    with client.infer("repeat", {"X": X}, outputs={"Y": hint}, parameters=TIMES) as result:
        assert result.overflowed == {"Y": THRICE.nbytes}
        np.testing.assert_array_equal(result["Y"], THRICE)


def test_a_model_whose_output_finds_no_room_runs_once(client: AnyClient) -> None:
    before = runs_so_far(client)
    with client.infer("repeat", {"X": X}, parameters=TIMES) as result:
        assert result.overflowed
        assert result["RUNS"][0] == before + 1
    assert runs_so_far(client) == before + 2


def test_an_output_that_outgrows_what_was_learned_is_learned_anew(client: AnyClient) -> None:
    for times in (1, 10, 100):
        with client.infer("repeat", {"X": X}, outputs=["Y"], parameters={"times": times}) as first:
            assert first.overflowed == {"Y": times * X.nbytes}
        with client.infer("repeat", {"X": X}, outputs=["Y"], parameters={"times": times}) as second:
            assert second.overflowed == {}


def test_what_was_learned_from_many_rows_is_no_more_than_one_row_needs(client: AnyClient) -> None:
    client.infer("rows", {"X": rows(4)}, parameters={"times": 5000}).release()
    with client.infer("rows", {"X": rows(1)}, parameters={"times": 5000}) as result:
        assert result.overflowed == {}
        assert client.stats().pool_bytes < 4 * result["REPEATED"].nbytes


@pytest.mark.parametrize("path", ["triton-shm", "inline"])
def test_without_a_hint_an_output_of_open_size_comes_back_on_every_path(client: AnyClient, path: PathName) -> None:
    for times in (1, 20):
        with client.infer("repeat", {"X": X}, outputs=["Y"], parameters={"times": times}, path=path) as result:
            assert result.overflowed == {}
            np.testing.assert_array_equal(result["Y"], np.tile(X, times))


def test_a_hint_that_is_too_small_is_an_error_where_the_output_can_come_back_no_other_way(client: AnyClient) -> None:
    with pytest.raises(OutputRoomError, match="needs more bytes than its hint gave it.*give a larger hint, or none"):
        client.infer("repeat", {"X": X}, outputs={"Y": 4}, parameters=TIMES, path="triton-shm")
    with client.infer("repeat", {"X": X}, outputs={"Y": 60}, parameters=TIMES, path="triton-shm") as result:
        np.testing.assert_array_equal(result["Y"], THRICE)


def test_several_dtypes_in_one_request(client: AnyClient) -> None:
    inputs = {f"IN_{name}": np.arange(7).astype(dtype.numpy) for name, dtype in NUMBERS.items()}
    hints = {f"OUT_{name}": ((7,), dtype.numpy) for name, dtype in NUMBERS.items()}
    with client.infer("every_dtype", inputs, outputs=hints) as result:
        assert not result.overflowed
        for name, dtype in NUMBERS.items():
            assert result[f"OUT_{name}"].dtype == dtype.numpy
            np.testing.assert_array_equal(result[f"OUT_{name}"], inputs[f"IN_{name}"][::-1])


def count_to(call: Any, count: int, delay_us: int = 0, **named: Any) -> Result:
    call.inputs["COUNT_AND_DELAY_US"][:] = count, delay_us
    result: Result = call.infer(**named)
    return result


def counted(count: int) -> list[int]:
    return list(range(count))


def spelled(count: int) -> list[bytes]:
    return [str(number).encode() for number in range(count)]


def is_right(result: Result, count: int) -> bool:
    return (result["NUMBERS"].tolist(), result["WORDS"].tolist()) == (counted(count), spelled(count))


def test_outputs_that_found_no_room_have_some_the_next_time(client: AnyClient) -> None:
    with client.prepare("counting", COUNTING) as call:
        first = count_to(call, 1000)
        assert first.overflowed.keys() == {"NUMBERS", "WORDS"}
        assert is_right(first, 1000)
        second = count_to(call, 1000)
        assert second.overflowed == {}
        assert lies_in_shared_memory(second["NUMBERS"])
        assert second.bytes_avoided > 4000
        assert is_right(second, 1000)
