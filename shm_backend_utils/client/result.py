"""What a call gives back: outputs as views of the slot that the model wrote them to."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import dtypes
from ..errors import ClosedError, PeerError
from ..region.managed import array_at

__all__ = ["Result", "read_results"]


class Result(Mapping[str, npt.NDArray[Any]]):
    """A mapping from output names to arrays, and a context manager.

    The arrays are views of shared memory: nothing is copied. The memory serves another call when the result *and* every
    array taken from it are gone; :meth:`release`, or leaving the ``with`` block, gives up the result's own share.

    Attributes
    ----------
    path : str
        ``"direct"``.
    response : tritonclient InferResult
        The server's reply, as ``tritonclient`` returns it.
    overflowed : mapping of str to int
        Outputs that found too little room in the slot and came back through Triton, with their sizes in bytes.
    """

    def __init__(
        self, arrays: dict[str, npt.NDArray[Any]], path: str, response: Any, overflowed: Mapping[str, int]
    ) -> None:
        self._arrays: dict[str, npt.NDArray[Any]] | None = arrays
        self.path = path
        self.response = response
        self.overflowed = overflowed

    def release(self) -> None:
        """Give up the arrays. Those that were taken out stay valid. Twice is fine."""
        self._arrays = None

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


def read_results(text: bytes, memory: npt.NDArray[np.uint8], response: Any) -> Result:
    """Make a result of what the model wrote into the slot's record.

    Parameters
    ----------
    text : bytes
        The record's results, copied out of shared memory. A peer wrote them: they are checked here.
    memory : numpy.ndarray of uint8
        The region that the slot is in.
    response : InferResult
        Holds the outputs that came back through Triton.

    Raises
    ------
    PeerError
        The results are not what protocol v1 says.
    """
    arrays: dict[str, npt.NDArray[Any]] = {}
    overflowed: dict[str, int] = {}
    try:
        for name, entry in json.loads(text).items():
            array = response.as_numpy(name) if entry is None else _view(memory, *entry)
            if array is None:
                raise ValueError(name)
            if entry is None:
                overflowed[name] = array.nbytes
            arrays[name] = array
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise PeerError(f"the model's results break the protocol: {error}; is it of the same version?") from None
    return Result(arrays, "direct", response, overflowed)


def _view(
    memory: npt.NDArray[np.uint8], type_name: str, shape: list[int], nbytes: int, region: int, offset: int
) -> npt.NDArray[Any]:
    dtype = dtypes.BY_NAME[type_name]
    array = array_at(memory, offset, dtype.numpy, tuple(shape), nbytes)
    if region != 0 or array is None or array.nbytes != nbytes:
        raise ValueError(f"a span of {nbytes} bytes that is not the call's")
    return array
