"""Requests on the direct path that are made by hand, so that a test can break any part of them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tritonclient.grpc

from shm_backend_utils.memory.managed import ManagedRegion

__all__ = ["HandMade", "hand_made"]

_STEP = 4096


class HandMade:
    """A region and a valid descriptor, sent by plain tritonclient.

    Attributes
    ----------
    descriptor : dict
        To be broken by the test. Tensors lie one after another, 4096 bytes apart.
    generation : int
        The slot's own, and what is sent unless the test changes it.
    parameters : dict
        The request's others.
    """

    def __init__(
        self,
        url: str,
        model: str,
        inputs: Mapping[str, npt.NDArray[Any]],
        outputs: Mapping[str, int],
        *,
        slot_count: int = 1,
        tensor_count: int = 8,
    ) -> None:
        self.region = ManagedRegion.create(tensor_count * _STEP, slot_count)
        self.region.record(0).generation = 5
        self.generation = 5
        self.parameters: dict[str, Any] = {}
        self._model = model
        self._grpc: Any = tritonclient.grpc.InferenceServerClient(url)
        places = iter(range(self.region.data_offset, self.region.header.byte_size, _STEP))
        self.descriptor: dict[str, Any] = {
            "v": 1,
            "model": model,
            "regions": [
                {
                    "kind": "system",
                    "key": self.region.segment.key,
                    "byte_size": self.region.header.byte_size,
                    "token": self.region.header.token.hex(),
                    "slot": 0,
                }
            ],
            "inputs": {name: self._put(next(places), array) for name, array in inputs.items()},
            "outputs": {name: [0, next(places), byte_size] for name, byte_size in outputs.items()},
        }

    def infer(self, carriers: Sequence[Any] = ()) -> Any:
        """Send it, and return the response or raise InferenceServerException."""
        return self._grpc.infer(self._model, list(carriers), parameters=self._all_parameters(), client_timeout=30)

    def stream(self, callback: Callable[[Any, Any], None]) -> None:
        """Send it to a decoupled model; responses are passed on as they come."""
        self._grpc.start_stream(callback)
        self._grpc.async_stream_infer(
            self._model, [], parameters=self._all_parameters(), enable_empty_final_response=True
        )

    def output(self, name: str, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Return what is in the memory of an output now."""
        _, offset, byte_size = self.descriptor["outputs"][name]
        array: npt.NDArray[Any] = self.region.bytes()[offset : offset + byte_size].copy().view(dtype)
        return array

    def close(self) -> None:
        """Remove the region."""
        self._grpc.close()
        self.region.segment.unlink()
        self.region.close()

    def _all_parameters(self) -> dict[str, Any]:
        return {**self.parameters, "shm_io": json.dumps(self.descriptor), "shm_generation": self.generation}

    def _put(self, offset: int, array: npt.NDArray[Any]) -> list[Any]:
        self.region.bytes()[offset : offset + array.nbytes] = np.ascontiguousarray(array).view(np.uint8).ravel()
        triton_dtype = {"float32": "FP32", "int64": "INT64"}[array.dtype.name]
        return [0, offset, array.nbytes, triton_dtype, list(array.shape)]


@contextlib.contextmanager
def hand_made(*arguments: Any, **named: Any) -> Iterator[HandMade]:
    """Make one, and remove it at the end."""
    with contextlib.closing(HandMade(*arguments, **named)) as request:
        yield request
