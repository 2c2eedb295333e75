"""The table of data types agrees with the libraries whose words it translates."""

from __future__ import annotations

import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

from shm_backend_utils import dtypes
from shm_backend_utils.dtypes import DType
from shm_backend_utils.errors import TensorError

NUMBERS = [dtype for dtype in dtypes.BY_NAME.values() if dtype is not dtypes.BYTES]
every_dtype = pytest.mark.parametrize("dtype", dtypes.BY_NAME.values(), ids=list(dtypes.BY_NAME))
every_number = pytest.mark.parametrize("dtype", NUMBERS, ids=[dtype.name for dtype in NUMBERS])


def test_the_table_holds_every_type_of_triton() -> None:
    assert list(dtypes.BY_NAME) == [
        *["BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64"],
        *["BF16", "BYTES"],
    ]


@every_number
def test_the_item_size_is_numpys_and_dlpacks(dtype: DType) -> None:
    assert dtype.itemsize == dtype.numpy.itemsize == dtype.dlpack_bits / 8


@every_number
def test_the_kind_is_the_same_in_numpy_dlpack_and_triton(dtype: DType) -> None:
    kind, dlpack_code = {"BOOL": ("b", 6), "UINT": ("u", 1), "INT": ("i", 0), "FP": ("f", 2), "BF": ("V", 4)}[
        dtype.name.rstrip("0123456789")
    ]
    assert (dtype.numpy.kind, dtype.dlpack_code) == (kind, dlpack_code)


@every_number
def test_the_name_tells_the_number_of_bits(dtype: DType) -> None:
    assert dtype.name == "BOOL" or dtype.name.endswith(str(dtype.dlpack_bits))


def test_strings_are_objects_without_a_size_and_without_a_type_in_dlpack() -> None:
    strings = dtypes.BYTES
    assert (strings.numpy, strings.itemsize, strings.dlpack_bits) == (np.dtype(object), 0, 0)
    assert strings.dlpack_code not in {dtype.dlpack_code for dtype in NUMBERS}


def test_bf16_is_the_type_of_ml_dtypes_where_that_is_installed() -> None:
    assert dtypes.BF16.numpy == np.dtype(ml_dtypes.bfloat16)
    assert dtypes.from_numpy(ml_dtypes.bfloat16, "X") is dtypes.BF16


WITHOUT_ML_DTYPES = """
import sys
sys.modules["ml_dtypes"] = None  # as if it were not installed
from shm_backend_utils.tensors import dlpack
from shm_backend_utils import dtypes
import numpy as np

assert (dtypes.BF16.numpy, dtypes.BF16.itemsize, dtypes.BF16.dlpack_code) == (np.dtype("V2"), 2, 4)
assert dtypes.from_numpy("V2", "X") is dtypes.from_config("TYPE_BF16") is dtypes.BF16
array = np.array([[0x3F80], [0x4000]], np.uint16).view("V2")  # 1 and 2
for given in (array, array.T, array[1:], array[:0]):
    taken = dlpack.consume(dlpack.export(given))  # which finds the type by DLPack's code
    assert (taken.dtype, taken.shape, taken.tobytes()) == (np.dtype("V2"), given.shape, given.tobytes())
print("as expected")
"""


def test_without_ml_dtypes_bf16_is_two_bytes_which_dlpack_knows_as_bfloat() -> None:
    program = [sys.executable, "-c", WITHOUT_ML_DTYPES]
    assert subprocess.run(program, capture_output=True, text=True, check=True).stdout == "as expected\n"


@pytest.mark.parametrize("unknown", ["V1", "V3", "V4", "V", ml_dtypes.float8_e5m2, ml_dtypes.int4], ids=str)
def test_other_types_of_bytes_or_of_ml_dtypes_are_refused(unknown: type | str) -> None:
    with pytest.raises(TensorError, match="tensor 'X' has NumPy dtype "):
        dtypes.from_numpy(unknown, "X")


@every_dtype
def test_a_numpy_type_leads_back_to_its_row(dtype: DType) -> None:
    assert dtypes.from_numpy(dtype.numpy, "X") is dtype


@every_dtype
def test_a_configurations_name_leads_to_its_row(dtype: DType) -> None:
    assert dtypes.from_config("TYPE_STRING" if dtype is dtypes.BYTES else f"TYPE_{dtype.name}") is dtype


@pytest.mark.parametrize("name", ["TYPE_INVALID", "TYPE_BYTES", "TYPE_FP8", "type_fp32", "", "TYPE_"])
def test_a_configurations_type_without_a_row_leads_to_none(name: str) -> None:
    assert dtypes.from_config(name) is None


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        (np.float32, "FP32"),
        ("float64", "FP64"),
        (np.longlong, "INT64"),
        (np.intp, "INT64"),
        (bool, "BOOL"),
        ("<i4", "INT32"),
        ("S4", "BYTES"),
        ("U4", "BYTES"),
        (bytes, "BYTES"),
        (str, "BYTES"),
        (object, "BYTES"),
    ],
)
def test_whatever_numpy_takes_for_a_type_is_found(alias: type | str, name: str) -> None:
    assert dtypes.from_numpy(alias, "X").name == name


@pytest.mark.parametrize("unsupported", ["c8", "M8[s]", "f4,i4", ">f4", ">u2", np.longdouble])
def test_a_numpy_type_without_a_row_is_refused(unsupported: type | str) -> None:
    with pytest.raises(
        TensorError, match=r"tensor 'IMAGE' has NumPy dtype .*; supported .* BOOL, UINT8, .*, BF16, BYTES"
    ) as caught:
        dtypes.from_numpy(unsupported, "IMAGE")
    assert caught.value.tensor == "IMAGE"


def test_the_table_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        dtypes.BY_NAME["FP8"] = dtypes.BY_NAME["FP16"]  # type: ignore[index]
