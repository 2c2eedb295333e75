"""What users may pass as an input, and what the model gets of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from shm_backend_utils.client.inputs.sources import Source, sources
from shm_backend_utils.errors import TensorError, TensorNameError, TensorShapeError, TensorTypeError
from shm_backend_utils.gpu.arrays.imported import imported, is_on_gpu
from shm_backend_utils.model_spec import ModelSpec
from shm_backend_utils.tensors.values import untyped_array

Array = npt.NDArray[Any]
PINNED_HOST = 3  # dlpack.h: kDLCUDAHost


def source(value: Any, config_dtype: str = "TYPE_FP32", dims: Sequence[int] = (-1,), max_batch_size: int = 0) -> Source:
    """Return what is made of a value that is passed for an input of this type and shape."""
    tensor = {"name": "X", "data_type": config_dtype, "dims": dims}
    described = {"name": "model", "input": [tensor], "max_batch_size": max_batch_size}
    return sources(ModelSpec.from_config(described), {"X": value})["X"]


def written(source: Source) -> Array:
    target: Array = np.full(source.shape, 77).astype(source.dtype.numpy)
    source.write_to(target)
    return target


def same(found: Array, expected: Array) -> bool:
    return found.dtype == expected.dtype and found.shape == expected.shape and bool((found == expected).all())


class Producer:
    """An array of another library: all that one can do is take it over by DLPack."""

    def __init__(self, array: Array, device: tuple[int, int] = (1, 0)) -> None:
        self._array = array
        self._device = device

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device

    def __dlpack__(self, **wanted: Any) -> Any:
        return self._array.__dlpack__(**{name: value for name, value in wanted.items() if value is not None})


class Interface:
    """An array of another library, by its array interface."""

    def __init__(self, array: Array) -> None:
        self.owner = array
        self.__array_interface__ = array.__array_interface__


class Unwilling(Producer):
    """Something that has DLPack's methods, and refuses; as PyTorch's tensors do that are part of a computation."""

    def __dlpack__(self, **wanted: Any) -> Any:
        raise BufferError("part of a computation")


VALUES = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.mark.parametrize(
    "kind", [np.asarray, Producer, lambda array: Producer(array, (PINNED_HOST, 0)), Interface, list]
)
def test_an_array_is_copied_only_once_and_not_before_it_is_written(kind: Any) -> None:
    array = VALUES.copy()
    made = source(kind(array), dims=(-1, 3))
    array[:] = -1
    assert (written(made) == -1).all()


@pytest.mark.parametrize("device", [2, 4, 7, 10, 13])
def test_a_producer_in_a_devices_memory_is_refused(device: int) -> None:
    with pytest.raises(TensorError, match=f"'X' lies on DLPack device type {device}; .* copy it there") as caught:
        source(Producer(VALUES, (device, 0)))
    assert caught.value.tensor == "X"
    with pytest.raises(TensorError, match="'X' is a .*Unwilling that cannot be read: part of a computation"):
        source(Unwilling(VALUES))


class Negated(Producer):
    """A tensor of torch whose memory has the wrong sign."""

    def is_neg(self) -> bool:
        return True

    def resolve_neg(self) -> Any:
        raise AssertionError("a copy that nobody asked for")


class Zeros(Producer):
    """A tensor of torch that is zero without any memory."""

    def _is_zerotensor(self) -> bool:
        return True


@pytest.mark.parametrize("device", [(1, 0), (2, 0)], ids=["host", "GPU"])
@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (Negated, r"lies in memory with the wrong sign .* give value.resolve_neg\(\)"),
        (Zeros, r"has zeros that lie nowhere .* give value.clone\(\)"),
    ],
)
def test_a_tensor_that_its_memory_does_not_hold_is_refused_wherever_it_lies(
    device: tuple[int, int], kind: type[Producer], text: str
) -> None:
    def take(name: str, value: Any, found: Mapping[str, Source]) -> Any:
        runtime: Any = None  # which is not asked
        return imported(runtime, value, 0, tensor=name) if is_on_gpu(value) else None

    spec = ModelSpec.from_config({"name": "model", "input": [{"name": "X", "data_type": "TYPE_FP32", "dims": [-1]}]})
    with pytest.raises(TensorTypeError, match=f"'X' {text}"):
        sources(spec, {"X": kind(VALUES, device)}, take)


@pytest.mark.parametrize("value", [[1, 2**63], [2**53 + 1, 2**63], [2**64], [0.5, 2**53 + 1], [np.int64(-1), 2**63]])
def test_integers_that_become_fractions_are_refused(value: list[Any]) -> None:
    with pytest.raises(TensorTypeError, match="'X' holds integers that no dtype holds .* give an array"):
        untyped_array("X", value)


@pytest.mark.parametrize("value", [[], [1, 0.5], [True, 2], [2**63], [-1]])
def test_numbers_of_no_given_dtype_are_as_numpy_takes_them(value: list[Any]) -> None:
    assert same(untyped_array("X", value), np.asarray(value))


def test_a_list_of_two_images_for_a_model_without_batches_is_not_one_image_twice_as_high() -> None:
    image = np.zeros((2, 4, 3), np.float32)
    with pytest.raises(
        TensorShapeError,
        match="tensor 'X' is a list of 2 arrays of 3 dimensions, but model 'model' takes one of them at a time; call "
        "it once for each, or join them, by np.concatenate for example",
    ):
        source([image, image], dims=(-1, -1, 3))
    assert same(written(source([image], dims=(-1, -1, 3))), image)


@pytest.mark.parametrize(
    ("value", "config_dtype"),
    [
        ([-1], "TYPE_UINT64"),
        ([2**24 + 1], "TYPE_FP32"),
        ([2**53 + 1], "TYPE_FP64"),
        ([0.5], "TYPE_INT32"),
        ([float("nan")], "TYPE_INT32"),
        ([float("inf")], "TYPE_INT64"),
        ([1], "TYPE_BOOL"),
        ([0.0], "TYPE_BOOL"),
        ([True], "TYPE_FP32"),
        ([True], "TYPE_UINT8"),
        ([1j], "TYPE_FP32"),
        *(([10**400], f"TYPE_{name}") for name in ("INT32", "UINT64", "FP16", "BF16", "FP64")),
        *((value, "TYPE_BOOL") for value in (None, {1}, {"x": 1}, [None], [object()])),
        *(([None], f"TYPE_{name}") for name in ("FP32", "INT8", "STRING", "BF16")),
        *((value, "TYPE_FP32") for value in ("word", ["word"], [b"word"], ["1.5"])),
        *((["word"], f"TYPE_{name}") for name in ("INT64", "BOOL", "BF16")),
    ],
    ids=lambda value: str(value)[:20],
)
def test_pythons_numbers_that_the_models_dtype_does_not_hold_are_refused(value: list[Any], config_dtype: str) -> None:
    with pytest.raises(TensorTypeError, match=f"'X' holds .*, which is no value of {config_dtype}") as caught:
        source(value, config_dtype)
    assert caught.value.tensor == "X"


@pytest.mark.parametrize("value", [[1.0], 1.0, ["word"], [VALUES], Producer(VALUES)], ids=type)
def test_what_has_to_be_read_for_an_input_that_the_model_does_not_have_is_refused(value: Any) -> None:
    spec = ModelSpec.from_config({"name": "model", "input": [{"name": "X", "data_type": "TYPE_FP32", "dims": [1]}]})
    with pytest.raises(TensorNameError, match="model 'model' has no input 'Y'; it has X"):
        sources(spec, {"Y": value})
