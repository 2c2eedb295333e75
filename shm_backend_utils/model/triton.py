"""The one module that touches ``triton_python_backend_utils``: tensors, their views, responses and errors."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from .. import dtypes
from ..dtypes import BF16, BYTES, DType
from ..errors import (
    CallerError,
    ClosedError,
    ForwardError,
    MachineError,
    ModelError,
    ProbedError,
    RegionGoneError,
    ReplayedRequestError,
    RequestCancelledError,
    RequestRefusedError,
    ShmError,
    SlotInUseError,
    StaleRequestError,
    StalledStreamError,
    refusal,
)
from ..gpu.instance import InstanceGpus
from ..protocol.probe import AskedForLifeError
from ..tensors import dlpack
from ..tensors.strings import Strings
from ..tensors.view import TRITON, BufferAttributes, MemoryType, StringsView, TensorView

__all__ = ["InBandView", "TritonBackend", "view_of"]

_NEWEST: Final = -1
_RESERVED: Final = "triton_"
_SOONER_COPIED: Final = 2**14  # bytes; copying these is faster than making a writable alias
_MOST_TEXT: Final = 2000
"""The longest text of an error, in bytes. Beyond a header of 8 KiB gRPC drops status and text, and a byte may take
three there."""


class OldBackendError(MachineError):
    """The server's Python backend lacks a feature that a newer Triton has."""


_CODES: Final[tuple[tuple[type[BaseException], str], ...]] = (
    (ClosedError, "UNAVAILABLE"),
    (CallerError, "INVALID_ARG"),
    (StaleRequestError, "CANCELLED"),
    (SlotInUseError, "CANCELLED"),
    (RequestCancelledError, "CANCELLED"),
    (ProbedError, "CANCELLED"),
    (StalledStreamError, "CANCELLED"),
    (ReplayedRequestError, "ALREADY_EXISTS"),
    (RegionGoneError, "NOT_FOUND"),
    (OldBackendError, "UNSUPPORTED"),
    (MachineError, "UNAVAILABLE"),
)


class TritonBackend:
    """Triton's Python backend in this process."""

    def __init__(self) -> None:
        import triton_python_backend_utils as pb_utils  # noqa: PLC0415  # exists only inside a stub process

        self._pb_utils: Any = pb_utils
        self.response: Callable[[list[Any]], Any] = pb_utils.InferenceResponse
        # A stub built for NumPy 1 reads NumPy 2's inputs as their first element, and its outputs as empty.
        probe = np.array([1, 2], np.int32)
        tensor = self.from_dlpack("probe", dlpack.export(probe))
        self.reads_numpy = bool((tensor.as_numpy() == probe).all())

    def input(self, tensor: Any, dtype: DType | None) -> npt.NDArray[Any]:
        """Return a delivered tensor as an aligned array that keeps the tensor alive; strings come as objects."""
        if self.reads_numpy and dtype is not BF16:  # the stub has no NumPy type for BF16
            array: npt.NDArray[Any] = tensor.as_numpy()
            return array
        array = dlpack.consume(tensor.to_dlpack()) if dtype is BF16 else dlpack.read(tensor.to_dlpack)
        return array if array.flags.aligned else array.copy()

    def pass_on(self, name: str, tensor: Any) -> Any:
        """Return a response tensor over the memory of a delivered tensor, which must not hold strings."""
        return self._pb_utils.Tensor.from_dlpack(name, tensor.to_dlpack())

    def output(self, name: str, array: npt.NDArray[Any]) -> Any:
        """Return a C-contiguous array as a tensor; ModelError for strings or BF16 if this stub does not accept them."""
        if self.reads_numpy and array.dtype != BF16.numpy:
            return self._pb_utils.Tensor(name, array)
        if array.dtype == BYTES.numpy:
            raise ModelError(
                f"output {name!r} holds strings, and Triton's stub, built for NumPy 1, cannot read them from NumPy "
                f"{np.__version__}: install numpy<2 or a newer Triton; the direct path is not affected"
            )
        try:
            is_copied = array.nbytes <= _SOONER_COPIED and not array.flags.writeable
            return self.from_dlpack(name, dlpack.export(array.copy() if is_copied else dlpack.writable_alias(array)))
        except Exception as error:
            if array.dtype != BF16.numpy:
                raise
            raise ModelError(
                f"output {name!r} holds BF16, which the Python backend of this Triton refuses ({error}): use Triton "
                "2.49 (24.08) or newer, or have the caller reserve memory for it: "
                f'outputs={{"{name}": {array.nbytes}}}'
            ) from None

    def check_sends_parameters(self) -> None:
        """Raise OldBackendError if this Triton does not support response parameters."""
        try:
            self._pb_utils.InferenceResponse([], None, {})
        except TypeError:
            raise OldBackendError(
                "response parameters need Triton 2.55 (25.02), and this server's Python backend is older; use a newer "
                "Triton, or put the values into an output"
            ) from None

    def response_with(self, tensors: list[Any], parameters: Mapping[str, object]) -> Any:
        """Return a response with tensors and parameters; ModelError for values that Triton does not pass on."""
        for name, value in parameters.items():
            if not isinstance(name, str) or name.startswith(_RESERVED):
                raise ModelError(f"response parameter {name!r}: expected a str that does not begin with {_RESERVED}")
            if not isinstance(value, str | int) or (isinstance(value, int) and not -(2**63) <= value < 2**63):
                raise ModelError(
                    f"response parameter {name!r} is {value!r}; expected a str, a bool or an int of 64 bits"
                )
        return self._pb_utils.InferenceResponse(tensors, None, dict(parameters))

    def from_dlpack(self, name: str, capsule: object) -> Any:
        """Return the memory of a DLPack capsule as a tensor for a response."""
        tensor = self._pb_utils.Tensor.from_dlpack(name, capsule)
        dlpack.mark_used(capsule)  # the backend's own name, "used_dlpack", makes NumPy's destructor loop for ever
        return tensor

    def error_response(self, error: BaseException) -> Any:
        """Return an error response for one request; our errors begin with a code, as HTTP drops Triton's status."""
        if isinstance(error, AskedForLifeError):
            return self.response([])
        codes = self._pb_utils.TritonError
        with contextlib.suppress(BaseException):  # most errors have other arguments, or none
            if isinstance(refusal := error.args[0], codes):
                error = RequestRefusedError(refusal.message(), refusal.code().name)
        name = next((code for kind, code in _CODES if isinstance(error, kind)), "INTERNAL")
        if isinstance(error, RequestRefusedError | ForwardError):
            name = error.status
        message = _as_utf8(_text_of(error))
        encoded = message.encode()
        if len(encoded) > _MOST_TEXT:
            message = f"{encoded[:_MOST_TEXT].decode(errors='ignore')} … (cut)"
        return self._pb_utils.InferenceResponse([], codes(message, getattr(codes, name)))

    def request(
        self, model: str, version: str, tensors: Iterable[Any], outputs: Iterable[str], parameters: Mapping[str, Any]
    ) -> Any:
        try:
            return self._pb_utils.InferenceRequest(
                model_name=model,
                model_version=int(version) if version else _NEWEST,
                inputs=list(tensors),
                requested_output_names=list(outputs),
                parameters=dict(parameters),
            )
        except Exception:
            for name, value in parameters.items():
                if not isinstance(value, str | int):
                    raise ModelError(
                        f"parameter {name!r} is {value!r}, which this Triton does not pass on from model to model; "
                        "expected a str, a bool or an int"
                    ) from None
            raise

    def send_last(self, sender: Any, response: Any = None) -> None:
        """End a stream, optionally with one more response."""
        flags = self._pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        if response is None:
            sender.send(flags=flags)
        else:
            sender.send(response, flags=flags)

    def metric_family(self, kind: str, name: str, description: str) -> Any:
        """Return a family of series on the server's metrics port, of ``kind`` ``"COUNTER"`` or ``"GAUGE"``."""
        families = getattr(self._pb_utils, "MetricFamily", None)
        if families is None:
            raise OldBackendError("this server's Python backend has no custom metrics; use a newer Triton")
        return families(name=name, description=description, kind=getattr(families, kind))

    def log_error(self, message: str) -> None:
        self._pb_utils.Logger.log_error(_as_utf8(message))

    def log_warning(self, message: str) -> None:
        self._pb_utils.Logger.log_warn(message)


def _text_of(error: BaseException) -> str:
    """Return the text of an error for a response, even if the error's ``__str__`` fails."""
    try:
        if isinstance(error, RequestRefusedError):
            return str(error)
        return refusal(error) if isinstance(error, ShmError) else f"{type(error).__name__}: {error}"
    except BaseException:
        return f"{type(error).__name__}, which has no text: its __str__ raises"


def _as_utf8(text: str) -> str:
    """Return a text for the backend, with escapes for characters that UTF-8 cannot encode."""
    return text.encode(errors="backslashreplace").decode()


class InBandView(TensorView):
    """A tensor on the host that Triton delivered, not of strings. Its array is made on first use."""

    __slots__ = ("_backend", "tensor")

    def __init__(self, name: str, tensor: Any, dtype: DType, backend: TritonBackend) -> None:
        self.name = name
        self.path = TRITON
        self.shape = tuple(tensor.shape())
        self.dtype = dtype.numpy
        self.tensor = tensor
        self._dtype = dtype
        self._memory_type = MemoryType.CPU
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        """Make the read-only array when it is first used."""
        if name != "_array":
            return super().__getattr__(name)  # type: ignore[misc]  # hidden from type checkers
        self._array = self._backend.input(self.tensor, self._dtype).view()
        self._array.flags.writeable = False
        return self._array

    @property
    def writable(self) -> bool:
        return False

    @property
    def attributes(self) -> BufferAttributes:
        return BufferAttributes(MemoryType.CPU, 0, math.prod(self.shape) * self._dtype.itemsize)


def view_of(tensor: Any, dtype: DType | None, backend: TritonBackend, arrays: InstanceGpus) -> TensorView:
    """Return a tensor of the Python backend as a read-only view; ``dtype`` is the configured one, if known."""
    name = tensor.name()
    if not tensor.is_cpu():
        adopted = arrays.adopt_capsule(tensor.to_dlpack())
        return arrays.view(name, adopted, dtypes.from_numpy(np.dtype(adopted.dtype), name), TRITON, writable=False)
    array = backend.input(tensor, dtype)
    found = dtypes.BY_NUMPY.get(array.dtype) or dtypes.from_numpy(array.dtype, name)
    if found is BYTES:
        return StringsView(name, Strings.of(name, array), TRITON)
    array = array.view()
    array.flags.writeable = False
    return TensorView(name, array, found, TRITON)
