"""An ordinary (in-band) request to another model of the server, and the parts that both kinds share."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ... import dtypes
from ...dtypes import BF16, BYTES
from ...errors import ForwardError, ModelError, PeerError, ShmError
from ...gpu.arrays.device_view import DeviceView
from ...gpu.arrays.imported import is_on_gpu
from ...gpu.instance import InstanceGpus
from ...gpu.uses import DeviceUses
from ...model_spec import ModelSpec
from ...protocol.call_layout import obstacle_in_tensors, record_byte_size
from ...protocol.results import check_output, missing_output
from ...tensors.strings import Strings
from ...tensors.values import untyped_array, whole_array
from ...tensors.view import TRITON, StringsView, TensorView
from ..triton import TritonBackend, view_of

__all__ = ["Asked", "ForwardOutputs", "Forwarding", "Given", "OrdinaryForwarding", "OtherModel"]


ForwardOutputs = Iterable[str] | Mapping[str, TensorView | int | None] | None
"""The outputs to return: names, or a mapping to a view to write to, a number of bytes, or None; None for all."""


class Given:
    """An input from ``model.py``, checked against the other model if its spec is known. Strings are encoded bytes."""

    device: int | None = None  # the layout reads this as it reads CallInput.device
    is_lent = False

    def __init__(
        self, spec: ModelSpec | None, name: str, value: Any, arrays: InstanceGpus, uses: DeviceUses | None = None
    ) -> None:
        strings: Strings | None = None
        dtype = dtypes.BY_NUMPY.get(value.dtype) if type(value) is np.ndarray else None
        if isinstance(value, TensorView):
            if isinstance(value, StringsView):
                strings = value.strings()
            else:
                value = value.array
        elif dtype is None or dtype is BYTES:
            value = _array_of(spec, name, value, arrays, uses)
            strings = value if isinstance(value, Strings) else None
        if strings is not None:
            dtype, value = BYTES, strings.encoded
        elif dtype is None or dtype is BYTES:
            dtype = dtypes.BY_NUMPY.get(value.dtype) or dtypes.from_numpy(value.dtype, name)
        self.dtype = dtype
        self.array: Any = value
        self.shape: tuple[int, ...] = tuple(value.shape) if strings is None else strings.shape
        self.byte_size: int = value.nbytes
        self.strings = strings
        self.is_plain = strings is None and isinstance(value, np.ndarray)
        self._arrays = arrays
        self._uses = uses
        if spec is not None:
            tensor = spec.inputs.get(name) or spec.input(name)
            rank, end = len(tensor.shape), tensor.fixed_end
            if self.dtype is not tensor.dtype or len(self.shape) != rank or (end and self.shape[-len(end) :] != end):
                tensor.check(self.dtype, self.shape)

    def bytes_on_host(self) -> npt.NDArray[Any]:
        """Return the array (for strings, the encoded bytes) on the host, copied if it is on a GPU."""
        if isinstance(self.array, np.ndarray):
            return self.array
        arrays, uses = self._arrays, self._uses
        return arrays.to_host(arrays.view("", self.array, self.dtype, TRITON, writable=False, uses=uses), uses)

    def elements_on_host(self) -> npt.NDArray[Any]:
        """Return the array (for strings, an array of ``bytes`` objects) on the host, copied if it is on a GPU."""
        return self.bytes_on_host() if self.strings is None else self.strings.numpy()


class OtherModel:
    """The called model, and the facts that follow from its configuration."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.maps_memory = spec.obstacle_to_direct() is None and obstacle_in_tensors(spec) is None
        self.record_byte_size = record_byte_size(spec)
        dtypes = {tensor.dtype for tensor in (*spec.inputs.values(), *spec.outputs.values())}
        # In band, strings may crash a stub that was built for another NumPy, and some stubs refuse BF16.
        self.takes_in_band = spec.paths is not None and "inline" in spec.paths and not dtypes & {BYTES, BF16, None}


class Asked(NamedTuple):
    """A request of ``model.py`` to another model."""

    model: str
    version: str  # empty if the server chooses
    other: OtherModel | None  # None if its configuration is unknown
    inputs: Mapping[str, Given]
    hints: Mapping[str, TensorView | int | None]  # for an output: a view to write to, or a number of bytes to reserve
    names: Sequence[str]  # the names of the outputs to return
    parameters: Mapping[str, Any]
    uses: DeviceUses | None = None  # of the call that asks; None if it uses no GPU so far


class Forwarding(ABC):
    request: Any  # the Python backend's request, to be executed
    rows = 1  # the number of rows of the inputs, if the model has batches

    def __init__(self, asked: Asked, backend: TritonBackend, arrays: InstanceGpus) -> None:
        self.model = asked.model
        self.overflowed: dict[str, int] = {}  # result() records the sizes of outputs that had no room
        self._spec = None if asked.other is None else asked.other.spec
        self._asked = asked
        self._backend = backend
        self._arrays = arrays

    @abstractmethod
    def result(self, response: Any) -> dict[str, TensorView]:
        """Return the outputs; ForwardError if the other model refused or failed the request."""

    def give_up(self) -> None:  # noqa: B027  # in-band tensors were copied: nothing to do
        """Make the other model refuse a request on shared memory that the model has not begun."""

    def _tensors_of(self, response: Any) -> dict[str, TensorView]:
        """Return the outputs in a response; ForwardError if the model failed, PeerError if an output is unreadable."""
        if response.has_error():
            error = response.error()
            text = f"model {self.model!r}, called on behalf of this request, failed: {error.message()}"
            raise ForwardError(text, error.code().name)
        spec, found = self._spec, dict[str, TensorView]()
        for tensor in response.output_tensors():
            name = tensor.name()
            if name in self._asked.names:
                expected = None if spec is None else spec.outputs.get(name)
                dtype = None if expected is None else expected.dtype
                try:
                    found[name] = view_of(tensor, dtype, self._backend, self._arrays)
                except ShmError:
                    raise
                except Exception as error:
                    raise PeerError(
                        f"model {self.model!r} answered with an output {name!r} that cannot be read: {error}"
                    ) from None
        return found

    def _given_back(self, name: str, view: TensorView) -> TensorView:
        """Return an output; if the user gave a view for it, copy the output there and return the user's view."""
        target = self._asked.hints.get(name)
        if not isinstance(target, TensorView):
            return view
        self._check_fits(name, target, view)
        if isinstance(target, DeviceView) or isinstance(view, DeviceView):
            self._arrays.copy_all([(target.array, view.array)], self._asked.uses)
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
    """A request in band, for a model without shared memory or small tensors; outputs over ``most_bytes`` overflow."""

    def __init__(
        self, asked: Asked, backend: TritonBackend, arrays: InstanceGpus, most_bytes: float = math.inf
    ) -> None:
        super().__init__(asked, backend, arrays)
        self._most_bytes = most_bytes
        tensors = []
        for name, each in asked.inputs.items():
            array = each.array if each.is_plain else each.elements_on_host()
            tensors.append(backend.output(name, array if array.flags.c_contiguous else array.copy()))
        self.request = backend.request(asked.model, asked.version, tensors, asked.names, asked.parameters)

    def result(self, response: Any) -> dict[str, TensorView]:
        tensors, spec = self._tensors_of(response), self._spec
        outputs, byte_size = {}, 0
        for name in self._asked.names:
            view = tensors.get(name)
            if view is None:
                raise missing_output(self.model, name)
            shape = view.shape
            if spec is not None:
                check_output(spec, name, dtypes.BY_NAME.get(view.triton_dtype), shape)
            byte_size += math.prod(shape) * view.dtype.itemsize
            hint = self._asked.hints.get(name)
            outputs[name] = self._given_back(name, view) if isinstance(hint, TensorView) else view
        if byte_size > self._most_bytes:
            self.overflowed = {name: view.array.nbytes for name, view in tensors.items()}
        return outputs


def _array_of(spec: ModelSpec | None, name: str, value: Any, arrays: InstanceGpus, uses: DeviceUses | None) -> Any:
    """Return a value as an array on the host or a GPU, or as strings; ``spec`` is the other model's, if known."""
    if isinstance(value, Strings):
        return value
    if is_on_gpu(value):
        return arrays.adopt(value, uses)
    array = untyped_array(name, value) if spec is None else whole_array(spec, spec.input(name), value)
    if spec is not None:  # check before reading objects as strings: the model may take numbers
        spec.input(name).check(dtypes.from_numpy(array.dtype, name), array.shape)
    return Strings.of(name, array) if array.dtype.kind in "OSU" else array
