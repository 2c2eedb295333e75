"""The checks of a session with SHM_DEBUG: they find outputs that were not written, and inputs that were.

A call fills an output's memory with random bytes before it returns it, and computes a digest of each input. When the
call commits, the random bytes must be gone, and the inputs unchanged. Memory on GPUs is not checked.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from ..errors import ModelError
from ..gpu.arrays.device_view import DeviceView
from ..gpu.uses import DeviceUses
from ..tensors.view import TensorView
from .call import Call
from .mapping.memory import HostMemory
from .metrics import MeasuredCall
from .modes.batch import Gathering, with_rows
from .modes.stream import StreamCall
from .triton import InBandView

__all__ = ["DEBUGGED", "PLAIN", "MeasuredDebugCall", "Poison"]

_PIECE: Final = 1 << 20  # bytes
_FALSE_ALARM: Final = 1e-6
_WORDS: Final = {2: np.uint16, 4: np.uint32, 8: np.uint64}

_Bytes = npt.NDArray[np.uint8]


class Poison:
    """Memory that is filled with random bytes. Only their seed is kept."""

    def __init__(self, data: _Bytes) -> None:
        self._data = data
        self._seed = secrets.randbits(128)
        for piece, noise in self._with_noise():
            piece[...] = noise

    def fills(self, view: TensorView) -> bool:
        """Return whether a view covers exactly this memory."""
        return type(view) is TensorView and (view.array.__array_interface__["data"][0], view.array.nbytes) == (
            self._data.__array_interface__["data"][0],
            self._data.nbytes,
        )

    def left(self, item_size: int) -> int:
        """Return how many elements of ``item_size`` bytes still have their random bytes; 0 if that may be chance."""
        if not self._data.nbytes:
            return 0
        words = np.dtype(_WORDS.get(item_size, np.uint8))
        count, size = 0, words.itemsize
        for piece, noise in self._with_noise():
            count += int(np.count_nonzero(piece.view(words) == noise.view(words)))
        return count if count >= _least_that_tells(self._data.nbytes / size / 256**size) else 0

    def _with_noise(self) -> Iterator[tuple[_Bytes, _Bytes]]:
        """Yield pieces of the memory, and the random bytes for each."""
        generator = np.random.Generator(np.random.SFC64(self._seed))
        for begin in range(0, self._data.nbytes, _PIECE):
            piece = self._data[begin : begin + _PIECE]
            yield piece, np.frombuffer(generator.bytes(piece.nbytes), np.uint8)


def _least_that_tells(expected: float) -> int:
    """Return how many equal elements are too many for chance, which makes ``expected`` of them (Chernoff's bound)."""
    least = max(1, math.floor(expected + 5 * math.sqrt(expected)))
    while least <= expected or math.exp(least - expected + least * math.log(expected / least)) > _FALSE_ALARM:
        least += 1
    return least


class DebugCall(Call):
    _filled: dict[str, Poison]
    _digests: dict[str, bytes]

    def begin(self) -> None:
        super().begin()
        self._filled = {}
        self._digests = {name: _digest(data) for name, data in self._input_bytes()}

    def output(self, name: str, shape: Sequence[int], dtype: npt.DTypeLike) -> TensorView:
        view = super().output(name, shape, dtype)
        if not isinstance(view, DeviceView):
            self._filled[name] = Poison(view.array.reshape(-1).view(np.uint8))
        return view

    def commit(self, *, needs_all: bool = True) -> None:
        super().commit(needs_all=needs_all)
        all_filled, self._filled = self._filled, {}
        if all_filled and self.devices:  # a GPU may be copying to the host
            self.devices.wait()
        for name, data in self._input_bytes():
            if _digest(data) != self._digests[name]:
                raise ModelError(
                    f"input {name!r} was changed during the call, most likely by model.py, which may only read it: the "
                    "memory is the client's, so the client's next call, forward() and put() would send the change; "
                    "copy it first, by torch.from_dlpack(view).clone() or np.array(view) (some libraries ignore that a "
                    "view is read-only)"
                )
        requested = self._request.requested_output_names()
        for name, filled in all_filled.items():
            view = self.outputs[name].view
            left = filled.left(view.dtype.itemsize) if name in requested and filled.fills(view) else 0
            if left:
                raise ModelError(
                    f"model.py asked for output {name!r} and has not written {left} of its {view.array.size} elements, "
                    "so the client would find old bytes there; write into the array "
                    "(y = call.output(…).numpy(); y[...] = x), or use call.put(name, array)"
                )

    def _input_bytes(self) -> Iterator[tuple[str, _Bytes]]:
        """Yield the bytes of each input on the host, except for strings from Triton, which are copies."""
        spans = {} if self.table is None else self.table.inputs
        for name, span in spans.items():
            memory = self._memories[span.region]
            if isinstance(memory, HostMemory):
                yield name, memory.bytes()[span.offset : span.offset + span.byte_size]
        for name, tensor in self._tensors_in_band().items():
            is_on_host = name in self.spec.inputs and name not in spans and tensor.is_cpu()
            view = self._input_in_band(name) if is_on_host else None
            if isinstance(view, InBandView):
                yield name, view.numpy().reshape(-1).view(np.uint8)


def _digest(data: _Bytes) -> bytes:
    return hashlib.blake2b(data.data, digest_size=16).digest()


class MeasuredDebugCall(MeasuredCall, DebugCall):
    """A call with the metrics and the checks."""


class DebugStreamCall(DebugCall, StreamCall):
    """A stream that checks the outputs of each response."""


class DebugGathering(Gathering):
    """The copies of one batch. Outputs that are split later begin with the random bytes of each call's rows."""

    def room(self, parts: Sequence[TensorView], uses: DeviceUses | None = None) -> TensorView:
        whole = super().room(parts, uses)
        for rows, part in with_rows(whole, parts) if not isinstance(whole, DeviceView) else ():
            if not isinstance(part, DeviceView):
                rows.reshape(-1).view(np.uint8)[...] = part.numpy().reshape(-1).view(np.uint8)
        return whole


PLAIN: Final = Call, MeasuredCall, StreamCall, Gathering
"""The classes of a session's calls without SHM_DEBUG."""

DEBUGGED: Final = DebugCall, MeasuredDebugCall, DebugStreamCall, DebugGathering
