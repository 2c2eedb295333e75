"""The table of data types agrees with the libraries whose words it translates; BF16, which NumPy has not."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from shm_backend_utils import dtypes
from shm_backend_utils.dtypes import BF16, DType
from shm_backend_utils.errors import ModelError, TensorError
from shm_backend_utils.model.triton import TritonBackend
from tests.unit.emulated import start_server

NUMBERS = [dtype for dtype in dtypes.BY_NAME.values() if dtype is not dtypes.BYTES]
every_dtype = pytest.mark.parametrize("dtype", dtypes.BY_NAME.values(), ids=list(dtypes.BY_NAME))
every_number = pytest.mark.parametrize("dtype", NUMBERS, ids=[dtype.name for dtype in NUMBERS])


def test_the_table_holds_every_type_of_triton() -> None:
    assert list(dtypes.BY_NAME) == [
        *["BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64"],
        *["BF16", "BYTES"],
    ]


@every_number
def test_size_kind_and_name_are_the_same_in_numpy_dlpack_and_triton(dtype: DType) -> None:
    kinds = {"BOOL": ("b", 6), "UINT": ("u", 1), "INT": ("i", 0), "FP": ("f", 2), "BF": ("V", 4)}
    assert dtype.itemsize == dtype.numpy.itemsize == dtype.dlpack_bits / 8
    assert (dtype.numpy.kind, dtype.dlpack_code) == kinds[dtype.name.rstrip("0123456789")]
    assert dtype.name == "BOOL" or dtype.name.endswith(str(dtype.dlpack_bits))


def test_strings_are_objects_without_a_size_and_without_a_type_in_dlpack() -> None:
    strings = dtypes.BYTES
    assert (strings.numpy, strings.itemsize, strings.dlpack_bits) == (np.dtype(object), 0, 0)
    assert strings.dlpack_code not in {dtype.dlpack_code for dtype in NUMBERS}


@every_dtype
def test_names_of_numpy_and_of_configurations_lead_to_a_types_row(dtype: DType) -> None:
    assert dtypes.from_numpy(dtype.numpy, "X") is dtype
    assert dtypes.from_config("TYPE_STRING" if dtype is dtypes.BYTES else f"TYPE_{dtype.name}") is dtype


@pytest.mark.parametrize("name", ["TYPE_INVALID", "TYPE_BYTES", "TYPE_FP8", "type_fp32", "", "TYPE_"])
def test_a_configurations_type_without_a_row_leads_to_none(name: str) -> None:
    assert dtypes.from_config(name) is None


@pytest.mark.parametrize(
    ("name", "aliases"),
    [
        ("FP32", [np.float32]),
        ("FP64", ["float64"]),
        ("INT64", [np.longlong, np.intp]),
        ("BOOL", [bool]),
        ("INT32", ["<i4"]),
        ("BYTES", ["S4", "U4", bytes, str, object]),
        ("BF16", [ml_dtypes.bfloat16]),
    ],
)
def test_whatever_numpy_takes_for_a_type_is_found(name: str, aliases: list[type | str]) -> None:
    assert {dtypes.from_numpy(alias, "X").name for alias in aliases} == {name}


@pytest.mark.parametrize(
    "unsupported",
    [
        *["c8", "M8[s]", "f4,i4", ">f4", ">u2", np.longdouble],
        *["V1", "V3", "V4", "V", ml_dtypes.float8_e5m2, ml_dtypes.int4],
    ],
    ids=str,
)
def test_a_numpy_type_without_a_row_is_refused(unsupported: type | str) -> None:
    with pytest.raises(
        TensorError, match=r"tensor 'IMAGE' has NumPy dtype .*; Triton has BOOL, UINT8, .*, BF16, BYTES: convert it"
    ) as caught:
        dtypes.from_numpy(unsupported, "IMAGE")
    assert caught.value.tensor == "IMAGE"


# BF16 in a response, where the Python backend is of a Triton that carries none


REASON = "Dtype is invalid."  # Triton 2.41's words


@pytest.fixture
def old_backend(monkeypatch: pytest.MonkeyPatch) -> TritonBackend:
    """The backend of a Triton that takes no BF16 by DLPack, nor anything else once it was probed."""
    start_server(monkeypatch)
    backend = TritonBackend()

    def refuse(name: str, capsule: object) -> Any:
        raise RuntimeError(REASON)

    monkeypatch.setattr(backend._pb_utils.Tensor, "from_dlpack", refuse)
    return backend


def test_the_error_tells_which_triton_carries_it_and_what_helps_before(old_backend: TritonBackend) -> None:
    with pytest.raises(ModelError) as refusal:
        old_backend.output("Y", np.zeros((2, 3), BF16.numpy))
    assert str(refusal.value) == (
        "output 'Y' holds BF16, which the Python backend of this Triton refuses (Dtype is invalid.): a response "
        'carries it from Triton 2.49 (24.08) on; before, the caller must have room for it: outputs={"Y": 12}'
    )
    old_backend.reads_numpy = False
    with pytest.raises(RuntimeError, match=REASON):  # another type's refusal is told as it is
        old_backend.output("Y", np.zeros(3, np.float32))
