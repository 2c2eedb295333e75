"""What a call gives back: outputs as views of the slot that the model wrote them to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..dtypes import BYTES
from ..errors import ClosedError
from ..protocol.results import OutputPlace, broken_results
from ..tensors.strings import Strings
from .space import Space

__all__ = ["Result", "result_of"]


_BYTE: Final = np.dtype(np.uint8)


class Result(Mapping[str, npt.NDArray[Any]]):
    """A mapping from output names to arrays, and a context manager.

    On the direct path, and on Triton's shared memory, the arrays are views of shared memory: nothing is copied. The
    memory serves another call when the result *and* every array taken from it are gone; :meth:`release`, or leaving the
    ``with`` block, gives up the result's own share.

    Attributes
    ----------
    path : str
        ``"direct"``, ``"triton-shm"`` or ``"inline"``: the way that this request went.
    response : tritonclient InferResult
        The server's reply, as ``tritonclient`` returns it; of a split call, that of its first part.
    overflowed : mapping of str to int
        Outputs that found too little room in the slot and came back through Triton, with their sizes in bytes.
    bytes_avoided : int
        Bytes of tensors that neither the request nor its response carried.
    """

    def __init__(
        self,
        arrays: dict[str, npt.NDArray[Any]],
        path: str,
        response: Any,
        overflowed: Mapping[str, int] | None = None,
        bytes_avoided: int = 0,
    ) -> None:
        self._arrays: dict[str, npt.NDArray[Any]] | None = arrays
        self.path = path
        self.response = response
        self.overflowed = overflowed or {}
        self.bytes_avoided = bytes_avoided

    def release(self) -> None:
        """Give up the arrays. Those that were taken out stay valid. Twice is fine."""
        self._arrays = None

    def copy(self) -> dict[str, npt.NDArray[Any]]:
        """Return all outputs as arrays of their own, which hold no shared memory."""
        return {name: array.copy() for name, array in self._held().items()}

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        return self._held()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._held())

    def __len__(self) -> int:
        return len(self._held())

    def __enter__(self) -> Result:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        if self._arrays is None:
            return "<Result released>"
        return f"<Result path={self.path} { ({name: array.shape for name, array in self._arrays.items()}) }>"

    def _held(self) -> dict[str, npt.NDArray[Any]]:
        if self._arrays is None:
            raise ClosedError("this result")
        return self._arrays


def result_of(
    places: tuple[OutputPlace, ...],
    spaces: Sequence[Space],
    memory: npt.NDArray[np.uint8],
    response: Any,
    input_size: int = 0,
) -> Result:
    """Return the outputs that are in these places of a region, or in the response.

    Parameters
    ----------
    places : tuple of OutputPlace
        Where the model wrote them.
    spaces : sequence of Space
        The call's regions.
    memory : numpy.ndarray of uint8
        The slot's whole region on the host.
    response : InferResult
        Holds those that came back through Triton.
    input_size : int
        Bytes of inputs that the request did not carry.

    Raises
    ------
    PeerError
        The response does not have an output that came back through Triton.
    """
    arrays: dict[str, npt.NDArray[Any]] = {}
    overflowed: dict[str, int] = {}
    avoided = input_size
    for name, dtype, shape, region, offset, byte_size in places:
        if byte_size is None:
            array = response.as_numpy(name)
            if array is None:
                raise broken_results(name)
            overflowed[name] = array.nbytes
            arrays[name] = array if dtype is None else _strings(name, array, shape)
            continue
        assert dtype is not None
        is_strings = dtype is BYTES
        try:
            array = (
                _strings(name, spaces[region].array_at(memory, offset, _BYTE, (byte_size,)), shape)
                if is_strings
                else spaces[region].array_at(memory, offset, dtype.numpy, shape)
            )
        except ValueError as error:  # more dimensions, or larger ones, than NumPy has
            raise broken_results(error) from None
        arrays[name] = array
        avoided += byte_size
    return Result(arrays, "direct", response, overflowed, avoided)


def _strings(name: str, encoded: npt.NDArray[Any], shape: tuple[int, ...]) -> npt.NDArray[Any]:
    if encoded.dtype != _BYTE:
        raise broken_results(f"{name} as {encoded.dtype}")
    try:
        return Strings.encoded_as(name, encoded, shape).numpy()
    except ValueError as error:  # TensorError, or of NumPy: a shape that no array has
        raise broken_results(error) from None
