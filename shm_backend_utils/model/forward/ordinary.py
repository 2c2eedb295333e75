"""A request to another model of the server, and what both kinds of it share."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ... import dtypes
from ...dtypes import BF16, BYTES
from ...errors import ForwardError, ModelError, PeerError, ShmError
from ...gpu.arrays.device_view import DeviceView
from ...gpu.arrays.imported import is_on_gpu
from ...gpu.model import DeviceArrays
from ...model_spec import ModelSpec
from ...protocol.call_layout import obstacle_in_tensors, record_byte_size
from ...protocol.results import check_output, missing_output
from ...tensors.strings import Strings
from ...tensors.strings_view import StringsView
from ...tensors.values import untyped_array, whole_array
from ...tensors.view import TRITON, TensorView
from ..delivered import view_of
from ..triton import TritonBackend

__all__ = ["Asked", "ForwardOutputs", "Forwarding", "Given", "OrdinaryForwarding", "OtherModel"]


ForwardOutputs = Iterable[str] | Mapping[str, TensorView | int | None] | None
"""The outputs that are wanted: names, or with what is known of each: a view to write to, or bytes; None for all."""


class Given:
    """An input as ``model.py`` has it, for a model whose configuration may be known. Strings are an array of bytes."""

    device: int | None = None  # as of a CallInput
    is_lent = False

    def __init__(self, spec: ModelSpec | None, name: str, value: Any, arrays: DeviceArrays) -> None:
        self._arrays = arrays
        self.array: Any = _array_of(spec, name, value, arrays)
        self._strings = self.array if isinstance(self.array, Strings) else None
        if self._strings is not None:
            self.dtype, self.shape, self.array = BYTES, self._strings.shape, self._strings.encoded
        else:
            self.dtype = dtypes.from_numpy(np.dtype(self.array.dtype), name)
            self.shape = tuple(self.array.shape)
        self.byte_size: int = self.array.nbytes
        self.is_on_gpu = not isinstance(self.array, np.ndarray)

    def bytes_on_host(self) -> npt.NDArray[Any]:
        """Return the array, or a copy of it if it is on a GPU; of strings, the bytes that they take in memory."""
        if not self.is_on_gpu:
            return self.array  # type: ignore[no-any-return]
        return self._arrays.to_host(self._arrays.view("", self.array, self.dtype, TRITON, writable=False))

    def elements_on_host(self) -> npt.NDArray[Any]:
        """Return the array, or a copy of it if it is on a GPU; of strings, an array of ``bytes`` objects."""
        return self.bytes_on_host() if self._strings is None else self._strings.numpy()


class OtherModel:
    """A model that is called, and what follows from its configuration."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.maps_memory = spec.obstacle_to_direct() is None and obstacle_in_tensors(spec) is None
        self.record_byte_size = record_byte_size(spec)
        dtypes = {tensor.dtype for tensor in (*spec.inputs.values(), *spec.outputs.values())}
        # In band, a stub that was built for another NumPy may die of strings, and some refuse BF16.
        self.takes_in_band = spec.paths is not None and "inline" in spec.paths and not dtypes & {BYTES, BF16, None}


class Asked(NamedTuple):
    """What ``model.py`` asks of another model."""

    model: str
    version: str  # empty if the server chooses
    other: OtherModel | None  # where it is known
    inputs: Mapping[str, Given]
    outputs: ForwardOutputs  # as the user wants them
    names: Sequence[str]  # of the outputs that are wanted
    parameters: Mapping[str, Any]


class Forwarding(ABC):
    """One request to another model."""

    request: Any  # the backend's, to be executed
    batch_size: int | None = None  # where it says so
    again: Callable[[], Forwarding] | None = None  # makes it in other memory, where that can be done

    def __init__(self, asked: Asked, backend: TritonBackend, arrays: DeviceArrays) -> None:
        self.model = asked.model
        self._spec = None if asked.other is None else asked.other.spec
        self._names = asked.names
        self.overflowed: dict[str, int] = {}  # by result(): outputs that found no room, and their bytes
        self._backend = backend
        self._arrays = arrays
        targets = asked.outputs.items() if isinstance(asked.outputs, Mapping) else ()
        self._targets = {name: target for name, target in targets if isinstance(target, TensorView)}

    @abstractmethod
    def result(self, response: Any) -> dict[str, TensorView]:
        """Return the outputs; ForwardError if the other model refused or failed the request."""

    @abstractmethod
    def give_up(self) -> None:
        """Have the other model refuse the request, if that would use memory of the client and has not begun."""

    def spoil_lost_memory(self, response: Any) -> str:
        """Spoil this memory if the other model could not open it; return what it said, else an empty text."""
        return ""

    def _tensors_of(self, response: Any) -> dict[str, TensorView]:
        """Return the outputs that the response carries, by name; raises ForwardError if it is an error."""
        if response.has_error():
            said = response.error()
            text = f"model {self.model!r}, called on behalf of this request, failed: {said.message()}"
            raise ForwardError(text, said.code().name)
        wanted = set(self._names)
        return {name: self._read(name, each) for each in response.output_tensors() if (name := each.name()) in wanted}

    def _read(self, name: str, tensor: Any) -> TensorView:
        """Return an output as a view; raise PeerError if the stub cannot read it as the configured dtype."""
        expected = None if self._spec is None else self._spec.outputs.get(name)
        dtype = None if expected is None else expected.dtype
        try:
            return view_of(tensor, dtype, self._backend, self._arrays, writable=False)
        except ShmError:
            raise
        except Exception as error:
            raise PeerError(
                f"model {self.model!r} answered with an output {name!r} that cannot be read: {error}"
            ) from None

    def _delivered(self, name: str, view: TensorView) -> TensorView:
        """Return an output where it is wanted: copied there, if it came another way."""
        target = self._targets.get(name)
        if target is None:
            return view
        self._check_fits(name, target, view)
        if isinstance(target, DeviceView) or isinstance(view, DeviceView):
            self._arrays.copy(target, view.array)
        else:
            np.copyto(target.numpy(), view.numpy())
        return target

    def _check_fits(self, name: str, target: TensorView, view: TensorView) -> None:
        if (target.triton_dtype, target.shape) != (view.triton_dtype, view.shape):
            raise ModelError(
                f"model {self.model!r} gave output {name!r} as {view.triton_dtype} of shape {list(view.shape)}, but "
                f"the memory for it is {target.triton_dtype} of shape {list(target.shape)}"
            )


class OrdinaryForwarding(Forwarding):
    """For models that share no memory, and small tensors: they go through the Python backend's pool.

    Outputs of more than ``most_bytes`` found too little room: the next call keeps as much for them, in memory.
    """

    def __init__(
        self, asked: Asked, backend: TritonBackend, arrays: DeviceArrays, most_bytes: float = math.inf
    ) -> None:
        super().__init__(asked, backend, arrays)
        self._most_bytes = most_bytes
        tensors = [
            backend.output(name, array if array.flags.c_contiguous else array.copy())
            for name, array in [(name, each.elements_on_host()) for name, each in asked.inputs.items()]
        ]
        self.request = backend.request(asked.model, asked.version, tensors, asked.names, asked.parameters)

    def result(self, response: Any) -> dict[str, TensorView]:
        tensors = self._tensors_of(response)
        for name in self._names:
            view = tensors.get(name)
            if view is None:
                raise missing_output(self.model, name)
            if self._spec is not None:
                check_output(self._spec, name, dtypes.BY_NAME.get(view.triton_dtype), view.shape)
        if sum([view.array.nbytes for view in tensors.values()]) > self._most_bytes:
            self.overflowed = {name: view.array.nbytes for name, view in tensors.items()}
        return {name: self._delivered(name, tensors[name]) for name in self._names}

    def give_up(self) -> None:
        pass  # its tensors were copied


def _array_of(spec: ModelSpec | None, name: str, value: Any, arrays: DeviceArrays) -> Any:
    """Return an array of the host or of a GPU, or strings; ``spec`` is the other model's, if that is known."""
    if isinstance(value, Strings):
        return value
    if isinstance(value, TensorView):
        return value.strings() if isinstance(value, StringsView) else value.array
    if is_on_gpu(value):
        return arrays.adopt(value)
    if spec is None:
        array = untyped_array(name, value)
    else:
        array = whole_array(spec, spec.input(name), value)
        spec.input(name).check(dtypes.from_numpy(array.dtype, name), array.shape)
    return Strings.of(name, array) if array.dtype.kind in "OSU" else array
