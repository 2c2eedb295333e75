"""What of a table only the configuration and the opened memory can tell, one bound at a time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from shm_backend_utils.dtypes import BY_NAME
from shm_backend_utils.errors import BatchSizeError, ShmError, TableError
from shm_backend_utils.model.call.admission import check_batch_size, check_table
from shm_backend_utils.model.mapping.memory import HostMemory, Memory
from shm_backend_utils.model_spec import ModelSpec
from shm_backend_utils.protocol.spans import InputSpan, OutputSpan, Ring, Table
from tests.unit.sessions import tensor

UINT8, FP32, BYTES = (BY_NAME[name] for name in ("UINT8", "FP32", "BYTES"))
BEGIN, SIZE = 4096, 8192


def spec(dtype: str = "UINT8", dims: list[int] | None = None) -> ModelSpec:
    """Return a model of input X and output Y."""
    wanted = dims or [-1]
    return ModelSpec.from_config({"name": "m", "input": [tensor("X", dtype, wanted)], "output": [tensor("Y", dtype)]})


def memories() -> list[Memory]:
    """Return the slot's own memory, and a further region of `SIZE` bytes whose first `BEGIN` bytes are no data."""
    array = np.zeros(SIZE + 64, np.uint8)
    array = array[-array.__array_interface__["data"][0] % 64 :]
    return [HostMemory(array), HostMemory(array, byte_size=SIZE, data_begin=BEGIN)]


def output(offset: int, byte_size: int, ring: Ring | None = None) -> Table:
    return Table({}, {"Y": OutputSpan(1, offset, byte_size)}, ring=ring)


def lying_input(offset: int, byte_size: int) -> Table:
    return Table({"X": InputSpan(UINT8, (byte_size,), 1, offset, byte_size)}, {})


@pytest.mark.parametrize("table_of", [output, lying_input])
def test_tensors_may_have_all_data_of_a_further_region_and_no_byte_more(table_of: Any) -> None:
    check_table(spec(), table_of(BEGIN, SIZE - BEGIN), memories())
    check_table(spec(), table_of(SIZE - 1, 1), memories())
    for offset, byte_size in ((BEGIN, SIZE - BEGIN + 1), (BEGIN - 1, 1), (SIZE, 1), (SIZE + 1, 0)):
        with pytest.raises(TableError, match="its region's data"):
            check_table(spec(), table_of(offset, byte_size), memories())


def test_the_last_place_of_a_ring_ends_with_its_further_region() -> None:
    check_table(spec(), output(SIZE - 24, 8, Ring(0, 3, 8)), memories())
    with pytest.raises(TableError, match="outputs.Y: found 25 bytes"):
        check_table(spec(), output(SIZE - 24, 9, Ring(0, 3, 8)), memories())


def test_a_ring_of_one_frame_has_no_stride() -> None:
    check_table(spec("FP32"), output(BEGIN, 16, Ring(0, 1, 3)), memories())
    with pytest.raises(TableError, match="frame_stride: found 3"):
        check_table(spec("FP32"), output(BEGIN, 16, Ring(0, 2, 3)), memories())


def test_strings_lie_on_the_host_alone() -> None:
    on_gpu = cast(Memory, SimpleNamespace(device=0, address=0, data_begin=0, byte_size=SIZE))
    table = Table({"X": InputSpan(BYTES, (1,), 1, 0, 5)}, {})
    with pytest.raises(TableError, match="inputs.X: found strings in memory of a GPU"):
        check_table(spec("STRING"), table, [memories()[0], on_gpu])
    check_table(spec("STRING"), table, [memories()[0], HostMemory(np.zeros(8, np.uint8))])
    check_table(spec(), Table({"X": InputSpan(UINT8, (5,), 1, 0, 5)}, {}), [memories()[0], on_gpu])


def test_room_for_strings_may_begin_anywhere() -> None:
    check_table(spec("STRING"), output(BEGIN + 1, 16, Ring(0, 2, 17)), memories())


def test_room_for_an_output_of_unknown_type_may_begin_anywhere() -> None:
    check_table(spec("UNHEARD_OF"), output(BEGIN + 1, 16), memories())


def test_an_input_of_a_fixed_size_must_have_it() -> None:
    with pytest.raises(ShmError, match="tensor 'X' has shape"):
        check_table(spec(dims=[4]), lying_input(BEGIN, 5), memories())


def test_a_batch_whose_input_has_no_dimension_is_refused() -> None:
    with pytest.raises(BatchSizeError, match="tensor 'X' has no dimension; its first one is the batch"):
        check_batch_size(Table({"X": InputSpan(UINT8, (), 0, BEGIN, 1)}, {}), 1)
