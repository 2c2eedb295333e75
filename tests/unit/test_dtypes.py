"""The table of data types agrees with the libraries whose words it translates."""

from __future__ import annotations

import numpy as np
import pytest

from shm_backend_utils import dtypes
from shm_backend_utils.dtypes import DType
from shm_backend_utils.errors import TensorError

every_dtype = pytest.mark.parametrize("dtype", dtypes.BY_NAME.values(), ids=list(dtypes.BY_NAME))


def test_the_table_holds_every_type_of_triton_with_a_numpy_type_of_fixed_size() -> None:
    assert list(dtypes.BY_NAME) == [
        *["BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64"]
    ]


@every_dtype
def test_the_item_size_is_numpys_and_dlpacks(dtype: DType) -> None:
    assert dtype.itemsize == dtype.numpy.itemsize == dtype.dlpack_bits / 8


@every_dtype
def test_the_kind_is_the_same_in_numpy_dlpack_and_triton(dtype: DType) -> None:
    kind, dlpack_code = {"BOOL": ("b", 6), "UINT": ("u", 1), "INT": ("i", 0), "FP": ("f", 2)}[
        dtype.name.rstrip("0123456789")
    ]
    assert (dtype.numpy.kind, dtype.dlpack_code) == (kind, dlpack_code)


@every_dtype
def test_the_name_tells_the_number_of_bits(dtype: DType) -> None:
    assert dtype.name == "BOOL" or dtype.name.endswith(str(dtype.dlpack_bits))


@every_dtype
def test_a_numpy_type_leads_back_to_its_row(dtype: DType) -> None:
    assert dtypes.from_numpy(dtype.numpy, "X") is dtype


@every_dtype
def test_a_configurations_name_leads_to_its_row(dtype: DType) -> None:
    assert dtypes.from_config(f"TYPE_{dtype.name}") is dtype


@pytest.mark.parametrize("name", ["TYPE_STRING", "TYPE_BF16", "TYPE_INVALID", "TYPE_BYTES", "type_fp32", "", "TYPE_"])
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
    ],
)
def test_whatever_numpy_takes_for_a_type_is_found(alias: type | str, name: str) -> None:
    assert dtypes.from_numpy(alias, "X").name == name


@pytest.mark.parametrize("unsupported", [object, "S4", "U4", "c8", "M8[s]", "f4,i4", ">f4", ">u2", np.longdouble])
def test_a_numpy_type_without_a_row_is_refused(unsupported: type | str) -> None:
    with pytest.raises(
        TensorError, match=r"tensor 'IMAGE' has NumPy dtype .*; supported .* BOOL, UINT8, .*, FP64"
    ) as caught:
        dtypes.from_numpy(unsupported, "IMAGE")
    assert caught.value.tensor == "IMAGE"


def test_the_table_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        dtypes.BY_NAME["BF16"] = dtypes.BY_NAME["FP16"]  # type: ignore[index]
