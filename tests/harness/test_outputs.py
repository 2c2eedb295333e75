"""Which outputs come back, how much room they get, and what happens to those that need more."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from shm_backend_utils import dtypes
from shm_backend_utils.client.errors import OutputRoomError
from shm_backend_utils.client.options import PathName
from tests.e2e.flavours import AnyClient
from tests.e2e.own_regions import lies_in_shared_memory

MODELS = ("brain_floats", "counting", "repeat", "rows")
X = np.arange(5, dtype=np.float32)
THRICE = np.tile(X, 3)
TIMES = {"times": 3}


def rows(count: int) -> npt.NDArray[np.float32]:
    return np.arange(4 * count, dtype=np.float32).reshape(count, 4)


@pytest.mark.parametrize(
    "hint", [THRICE.nbytes, (THRICE.shape, np.float32), ((3, 5), "f4"), 10 * THRICE.nbytes], ids=str
)
def test_an_output_lies_in_the_room_that_was_hinted_at(client: AnyClient, path: PathName, hint: Any) -> None:
    with client.infer("repeat", {"X": X}, outputs={"Y": hint}, parameters=TIMES, path=path) as result:
        assert (list(result), result.overflowed) == (["Y"], {})
        np.testing.assert_array_equal(result["Y"], THRICE)


@pytest.mark.parametrize("hint", [None, 0, 4, ((14,), np.float32)], ids=str)
def test_an_output_that_finds_no_room_comes_back_in_the_same_response_of_one_run(client: AnyClient, hint: Any) -> None:
    with client.infer("repeat", {"X": X}, outputs=["RUNS"], parameters=TIMES) as result:
        before = int(result["RUNS"][0])
    with client.infer("repeat", {"X": X}, outputs={"Y": hint, "RUNS": 8}, parameters=TIMES) as result:
        assert result.overflowed == {"Y": THRICE.nbytes}
        np.testing.assert_array_equal(result["Y"], THRICE)
        assert result["RUNS"][0] == before + 1


def test_an_output_that_outgrows_what_was_learned_is_learned_anew(client: AnyClient) -> None:
    for times in (1, 10, 100):
        for overflowed in ({"Y": times * X.nbytes}, {}):
            with client.infer("repeat", {"X": X}, outputs=["Y"], parameters={"times": times}) as result:
                assert result.overflowed == overflowed


def test_what_was_learned_from_many_rows_is_no_more_than_one_row_needs(client: AnyClient) -> None:
    client.infer("rows", {"X": rows(4)}, parameters={"times": 5000}).release()
    with client.infer("rows", {"X": rows(1)}, parameters={"times": 5000}) as result:
        assert result.overflowed == {}
        assert client.stats().pool_bytes < 4 * result["REPEATED"].nbytes


def test_without_a_hint_an_output_of_open_size_comes_back_on_every_path(client: AnyClient, path: PathName) -> None:
    for times in (1, 20):
        with client.infer("repeat", {"X": X}, parameters={"times": times}, path=path) as result:
            assert sorted(result) == ["RUNS", "Y"]
            np.testing.assert_array_equal(result["Y"], np.tile(X, times))


def test_a_hint_that_is_too_small_is_an_error_where_the_output_can_come_back_no_other_way(client: AnyClient) -> None:
    with pytest.raises(OutputRoomError, match="needs more bytes than its hint gave it.*give a larger hint, or none"):
        client.infer("repeat", {"X": X}, outputs={"Y": 4}, parameters=TIMES, path="triton-shm")


def test_outputs_that_found_no_room_have_some_the_next_time(client: AnyClient) -> None:
    with client.prepare("counting", {"COUNT_AND_DELAY_US": ((2,), np.int64)}) as call:
        call.inputs["COUNT_AND_DELAY_US"][:] = 1000, 0
        first, second = call.infer(), call.infer()
        for result in (first, second):
            assert result["NUMBERS"].tolist() == list(range(1000))
            assert result["WORDS"].tolist() == [str(number).encode() for number in range(1000)]
        assert (set(first.overflowed), set(second.overflowed)) == ({"NUMBERS", "WORDS"}, set())
        assert lies_in_shared_memory(second["NUMBERS"])
        assert second.bytes_avoided > 4000


def test_an_output_view_can_be_the_next_input_and_inputs_are_left_as_they_were(
    client: AnyClient, path: PathName
) -> None:
    x = rows(3)
    with (
        client.infer("rows", {"X": x}, outputs=["DOUBLED"], path=path) as first,
        client.infer("rows", {"X": first["DOUBLED"]}, outputs=["DOUBLED"], path=path) as second,
    ):
        np.testing.assert_array_equal(first["DOUBLED"], rows(3) * 2)
        np.testing.assert_array_equal(second["DOUBLED"], rows(3) * 4)
    np.testing.assert_array_equal(x, rows(3))


@pytest.mark.filterwarnings("ignore:invalid value encountered in add")
def test_every_bit_of_brain_floats_is_kept(client: AnyClient, path: PathName) -> None:
    bf16 = dtypes.BF16.numpy
    # 1, -2, infinity, two that are no numbers, -0, and the smallest
    bits = np.array([0x3F80, 0xC000, 0x7F80, 0x7FC1, 0x7F81, 0x8000, 0x0001], np.uint16).view(bf16)
    hints = {"Y": (bits.shape, bf16), "SAME": None if path == "direct" else bits.nbytes}
    with client.prepare("brain_floats", {"X": (bits.shape, bf16)}, outputs=hints, path=path) as call:
        call.inputs["X"][:] = bits
        with call.infer() as result:
            assert result["SAME"].tobytes() == bits.tobytes()
            assert (result["Y"].dtype, result["Y"][:2].tolist(), result.overflowed) == (bf16, [2, -4], {})
            assert lies_in_shared_memory(result["Y"]) is (path != "inline")
