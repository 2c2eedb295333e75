"""What can be passed as an input: the model gets the same bytes, whatever held them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest

from shm_backend_utils.client.options import PathName

from .flavours import AnyClient

THREE_ROWS: Final = np.arange(12, dtype=np.float32).reshape(3, 4)


class Exporter:
    """Has DLPack's two methods, and nothing else."""

    def __init__(self, array: npt.NDArray[Any]) -> None:
        self._array = array

    def __dlpack__(self, **named: Any) -> Any:
        return self._array.__dlpack__(**named)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._array.__dlpack_device__()


class Described:
    """Has __array_interface__, and nothing else."""

    def __init__(self, array: npt.NDArray[Any]) -> None:
        self._array = array
        self.__array_interface__ = array.__array_interface__


class Convertible:
    """Has __array__, and nothing else."""

    def __init__(self, array: npt.NDArray[Any]) -> None:
        self._array = array

    def __array__(self, *arguments: Any, **named: Any) -> npt.NDArray[Any]:
        return self._array


def spread(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return an equal array whose elements do not lie side by side."""
    wide: npt.NDArray[Any] = np.zeros((array.shape[0] * 2, array.shape[1] * 3), array.dtype)
    view = wide[::2, ::3]
    view[:] = array
    return view


def read_only(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    copy: npt.NDArray[Any] = array.copy()
    copy.flags.writeable = False
    return copy


KINDS: Final[dict[str, Callable[[npt.NDArray[Any]], Any]]] = {
    "array": lambda array: array,
    "Fortran order": np.asfortranarray,
    "not contiguous": spread,
    "reversed": lambda array: array[::-1].copy()[::-1],
    "big-endian": lambda array: array.astype(">f4"),
    "read-only": read_only,
    "transposed": lambda array: array.T.copy().T,
    "list of rows": list,
    "tuple of rows": tuple,
    "list of batches": lambda array: [array[:1], array[1:]],
    "list of rows in all orders": lambda array: [array[0], array[1, ::-1].copy()[::-1], spread(array)[2]],
    "list of DLPack objects": lambda array: [Exporter(row) for row in array],
    "DLPack object": Exporter,
    "__array_interface__": Described,
    "__array__": Convertible,
    "nested lists of numbers": lambda array: array.tolist(),
    "nested lists of integers": lambda array: array.astype(int).tolist(),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_model_gets_the_same_whatever_held_it(any_client: AnyClient, path: PathName, kind: str) -> None:
    with any_client.infer("rows", {"X": KINDS[kind](THREE_ROWS)}, outputs=["DOUBLED"], path=path) as result:
        np.testing.assert_array_equal(result["DOUBLED"], THREE_ROWS * 2)


@pytest.mark.parametrize("scalar", [7, 7.0, np.float32(7), np.array([7], np.float32)], ids=repr)
def test_one_number_is_a_tensor_of_one_element(any_client: AnyClient, path: PathName, scalar: Any) -> None:
    with any_client.infer("identity", {"INPUT0": scalar}, path=path) as result:
        np.testing.assert_array_equal(result["OUTPUT0"], np.array([7], np.float32))


def test_inputs_are_left_as_they_were(any_client: AnyClient, path: PathName) -> None:
    x = THREE_ROWS.copy()
    any_client.infer("rows", {"X": x}, outputs=["DOUBLED"], path=path).release()
    np.testing.assert_array_equal(x, THREE_ROWS)


def test_an_output_view_can_be_the_next_input(any_client: AnyClient, path: PathName) -> None:
    with (
        any_client.infer("rows", {"X": THREE_ROWS}, outputs=["DOUBLED"], path=path) as first,
        any_client.infer("rows", {"X": first["DOUBLED"]}, outputs=["DOUBLED"], path=path) as second,
    ):
        np.testing.assert_array_equal(second["DOUBLED"], THREE_ROWS * 4)
