"""The outputs of one call: where each is written, on the host or on a GPU, and how it gets to the client."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import dtypes
from ..dtypes import BYTES, DType
from ..errors import ModelError, TensorError
from ..model_spec import ModelSpec
from ..tensors import dlpack
from ..tensors.strings import Strings
from ..tensors.strings_view import StringsView
from ..tensors.view import TensorView
from .device_arrays import DeviceArrays, is_on_device
from .device_view import DeviceView
from .incoming import TRITON
from .places import Output, Places

__all__ = ["Outputs"]


class Outputs:
    """What ``model.py`` writes in one call.

    Parameters
    ----------
    spec : ModelSpec
        The model's.
    arrays : DeviceArrays
        For GPUs.
    places : Places or None
        Room in the client's memory, where it provides any.

    Attributes
    ----------
    devices : set of int
        GPUs that have work to finish for these outputs.
    copied : frozenset of str
        Outputs that were copied to the client's memory.
    finished : sequence of Output
        What :meth:`finish` returned.
    """

    __slots__ = ("_arrays", "_places", "_spec", "_written", "copied", "devices", "finished")

    def __init__(self, spec: ModelSpec, arrays: DeviceArrays, places: Places | None) -> None:
        self.devices: set[int] = set()
        self.copied: frozenset[str] = frozenset()
        self.finished: Sequence[Output] = ()
        self._spec = spec
        self._arrays = arrays
        self._places = places
        self._written: dict[str, Output] = {}

    def make(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> TensorView:
        """Return memory for an output: the client's own, where it has provided enough.

        Raises
        ------
        ModelError
            The model's configuration has no such output, or not of this dtype and shape.
        """
        if dtype.kind in "OSU":
            raise ModelError(f"output {name!r} holds strings, of which nobody knows the size yet; use call.put()")
        output = None if self._places is None else self._places.known_output(name, shape, dtype)
        if output is None:
            checked = self._check(name, dtype, shape)
            output = None if self._places is None else self._places.output(name, shape, checked)
            output = output or self._kept(name, np.empty(shape, dtype), checked)
        self._written[name] = output
        return output.view

    def make_on_device(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> DeviceView:
        """Return memory of a GPU for an output, which is copied to where it belongs if it belongs on the host."""
        view = self.make(name, shape, dtype)
        if isinstance(view, DeviceView):
            return view
        made = self._arrays.empty(name, shape, dtypes.from_numpy(dtype, name), TRITON)
        output = self._written[name]
        self._written[name] = Output(made) if not output.is_delivered else Output(view, output.place, made)
        self.devices.add(made.device)
        return made

    def put(self, name: str, value: Any) -> None:
        """Take an array as an output: one copy, or none if it is memory of this call; raises as :meth:`make`."""
        if isinstance(value, StringsView):
            value = value.strings()
        if isinstance(value, Strings):
            self._put_strings(name, value)
            return
        source = self._array_of(name, value)
        dtype = self._check(name, np.dtype(source.dtype), tuple(source.shape))
        if dtype is BYTES:
            self._put_strings(name, Strings.of(name, source))
            return
        output = None
        if self._places is not None:
            output = self._places.pass_through(name, dtype, source, tuple(source.shape))
            if output is None:
                output = self._places.output(name, tuple(source.shape), dtype)
                if output is not None:
                    self._fill(output.view, source)
        self._written[name] = output or self._kept(name, source, dtype)

    def finish(self, requested: Collection[str]) -> list[Output]:
        """Bring every output to its place, or on its way there, and return those that the client wants.

        Raises
        ------
        ModelError
            The model has not made one.
        """
        for name in self._spec.outputs:
            if name in requested and name not in self._written:
                raise ModelError(f"output {name!r} was requested, but model.py wrote none")
        return self.finish_some(requested)

    def finish_some(self, requested: Collection[str]) -> list[Output]:
        """As :meth:`finish`, for those alone that the model has made."""
        outputs = [self._written[name] for name in self._spec.outputs if name in requested and name in self._written]
        for output in outputs:
            if output.source is not None:
                self._fill(output.view, output.source.array)
        self.finished = outputs
        return outputs

    def _put_strings(self, name: str, strings: Strings) -> None:
        self._check(name, BYTES.numpy, strings.shape)
        try:
            encoded = strings.encoded
        except TensorError as error:
            raise ModelError(f"model.py wrote an output that it may not: {error}") from None
        output = None
        if self._places is not None:
            output = self._places.pass_through(name, BYTES, encoded, strings.shape)
            output = output or self._places.strings(name, strings.shape, encoded)
        self._written[name] = output or Output(StringsView(name, strings, TRITON), [BYTES.name, strings.shape])

    def _array_of(self, name: str, value: Any) -> Any:
        """Return what a user gives as an array of NumPy, or of CuPy if it is on a GPU."""
        if isinstance(value, np.ndarray):
            return value
        if isinstance(value, TensorView):
            return value.array
        if is_on_device(value):
            return self._arrays.adopt(value)
        if hasattr(value, "__dlpack__"):
            with contextlib.suppress(BufferError, RuntimeError, TypeError):  # then maybe NumPy can do it otherwise
                return dlpack.array_of(value)
        spec = self._spec.outputs.get(name)
        holds_strings = spec is not None and spec.dtype is BYTES
        # As strings of NumPy they would lose zeros at their end.
        return np.array(value, object) if holds_strings else np.asarray(value)

    def _fill(self, view: TensorView, source: Any) -> None:
        """Copy an array of NumPy or CuPy to a view, unless it is that very memory."""
        if isinstance(source, np.ndarray) and not isinstance(view, DeviceView):
            if not _is_same_memory(view, source):
                np.copyto(view.numpy(), source)
                self.copied |= {view.name}
            return
        self.devices.add(self._arrays.copy(view, source))
        self.copied |= {view.name}

    def _kept(self, name: str, array: Any, dtype: DType) -> Output:
        """Return an output that goes back through Triton."""
        if isinstance(array, np.ndarray):
            contiguous = np.ascontiguousarray(array).reshape(array.shape)  # the first makes a scalar one-dimensional
            return Output(TensorView(name, contiguous, dtype, TRITON))
        view = self._arrays.view(name, array, dtype, TRITON, writable=True)
        self.devices.add(view.device)
        return Output(view)

    def _check(self, name: str, numpy_dtype: np.dtype[Any], shape: tuple[int, ...]) -> DType:
        try:
            dtype = dtypes.from_numpy(numpy_dtype, name)
            self._spec.output(name).check(dtype, shape)
        except TensorError as error:
            raise ModelError(f"model.py wrote an output that it may not: {error}") from None
        return dtype


def _is_same_memory(view: TensorView, source: npt.NDArray[Any]) -> bool:
    return bool(source.flags.c_contiguous) and view.numpy().ctypes.data == source.ctypes.data
