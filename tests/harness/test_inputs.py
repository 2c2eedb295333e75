"""What can be passed as an input: the model gets the same bytes, whatever held them."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest

from shm_backend_utils import dtypes
from shm_backend_utils.client.options import PathName
from tests.e2e.flavours import AnyClient
from tests.e2e.own_regions import lies_in_shared_memory

MODELS = ("brain_floats", "identity", "rows")

THREE_ROWS: Final = np.arange(12, dtype=np.float32).reshape(3, 4)


def test_inputs_are_left_as_they_were(client: AnyClient, path: PathName) -> None:
    x = THREE_ROWS.copy()
    client.infer("rows", {"X": x}, outputs=["DOUBLED"], path=path).release()
    np.testing.assert_array_equal(x, THREE_ROWS)


def test_an_output_view_can_be_the_next_input(client: AnyClient, path: PathName) -> None:
    with (
        client.infer("rows", {"X": THREE_ROWS}, outputs=["DOUBLED"], path=path) as first,
        client.infer("rows", {"X": first["DOUBLED"]}, outputs=["DOUBLED"], path=path) as second,
    ):
        np.testing.assert_array_equal(second["DOUBLED"], THREE_ROWS * 4)


BF16: Final = dtypes.BF16.numpy
HALVES: Final = np.array([1, -2, 0.5, 0, -0.0, np.inf, 1e38], BF16)
BITS: Final = np.array([0x3F80, 0xC000, 0x7F80, 0x7FC1, 0x7F81, 0x8000, 0x0001], np.uint16).view(BF16)
"""1, -2, infinity, two that are no numbers, -0, and the smallest."""

not_a_number = pytest.mark.filterwarnings("ignore:invalid value encountered in add")


@not_a_number
@pytest.mark.parametrize("x", [BITS, BITS[:0], BITS[:1]], ids=["all", "none", "one"])
def test_every_bit_of_brain_floats_is_kept(client: AnyClient, path: PathName, x: npt.NDArray[Any]) -> None:
    with client.infer("brain_floats", {"X": x}, path=path) as result:
        assert result["SAME"].tobytes() == x.tobytes()
        assert (result["Y"].dtype, result["Y"].shape) == (BF16, x.shape)


def test_brain_floats_lie_in_shared_memory_both_ways(client: AnyClient) -> None:
    hints = {"Y": ((7,), BF16), "SAME": None}
    with client.prepare("brain_floats", {"X": ((7,), BF16)}, outputs=hints) as call:
        for x in (HALVES, -HALVES):
            call.inputs["X"][:] = x
            with call.infer() as result:
                assert result.overflowed == {}
                assert lies_in_shared_memory(result["Y"])
                assert result["Y"].tolist() == (x + x).tolist()
                assert result["SAME"].ctypes.data == call.inputs["X"].ctypes.data
