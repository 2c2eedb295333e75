"""The half of ``triton_python_backend_utils`` that is compiled into the process which runs ``model.py``.

``import triton_python_backend_utils as pb_utils`` has the most of it. What models meet and ``pb_utils`` has no name for
is named here alone: response senders, iterators of responses, traces, metrics. Both modules exist only in a process
that Triton started.

Tensors, requests and responses raise :class:`TritonModelException` where a value is wrong, and ``TypeError`` where a
type is.
"""

from asyncio import Future
from collections.abc import Mapping, Sequence
from concurrent.futures import Future as ConcurrentFuture
from typing import Any, ClassVar, Literal, NoReturn, Protocol, TypeAlias, overload, type_check_only

import numpy.typing as npt
from typing_extensions import CapsuleType

_Parameters: TypeAlias = Mapping[str, bool | int | str]  # a dict, whatever its values' type

@type_check_only
class _Enum:
    """What values of all enumerations have; they equal their numbers."""

    def __init__(self, value: int) -> None: ...
    __members__: ClassVar[dict[str, Any]]
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...
    def __int__(self) -> int: ...
    def __index__(self) -> int: ...
    def __eq__(self, other: object) -> bool: ...
    def __ne__(self, other: object) -> bool: ...
    def __hash__(self) -> int: ...

@type_check_only
class _HasDLPack(Protocol):
    def __dlpack__(self, *, stream: Any) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...

class TritonModelException(Exception):  # noqa: N818  # its name
    """What the backend raises. Raised by a model, it is an error like any other."""

class TritonError:
    """Why a request failed, for its response. It is no exception.

    Parameters
    ----------
    message
        The text that the client gets.
    code
        From Triton 23.09 (2.38) on. Which kind of error it is, for the client.

    Raises
    ------
    TypeError
        ``code`` is a number.
    """

    class __ErrorCode(_Enum):
        """From Triton 23.09 (2.38) on. Triton's codes of errors."""

        UNKNOWN: ClassVar[TritonError.__ErrorCode]
        INTERNAL: ClassVar[TritonError.__ErrorCode]
        NOT_FOUND: ClassVar[TritonError.__ErrorCode]
        INVALID_ARG: ClassVar[TritonError.__ErrorCode]
        UNAVAILABLE: ClassVar[TritonError.__ErrorCode]
        UNSUPPORTED: ClassVar[TritonError.__ErrorCode]
        ALREADY_EXISTS: ClassVar[TritonError.__ErrorCode]
        CANCELLED: ClassVar[TritonError.__ErrorCode]
        """From Triton 23.10 (2.39) on."""

    UNKNOWN: ClassVar[__ErrorCode]
    """From Triton 23.09 (2.38) on."""
    INTERNAL: ClassVar[__ErrorCode]
    """From Triton 23.09 (2.38) on."""
    NOT_FOUND: ClassVar[__ErrorCode]
    """From Triton 23.09 (2.38) on."""
    INVALID_ARG: ClassVar[__ErrorCode]
    """From Triton 23.09 (2.38) on."""
    UNAVAILABLE: ClassVar[__ErrorCode]
    """From Triton 23.09 (2.38) on."""
    UNSUPPORTED: ClassVar[__ErrorCode]
    """From Triton 23.09 (2.38) on."""
    ALREADY_EXISTS: ClassVar[__ErrorCode]
    """From Triton 23.09 (2.38) on."""
    CANCELLED: ClassVar[__ErrorCode]
    """From Triton 23.10 (2.39) on."""

    def __init__(self, message: str, code: __ErrorCode = ...) -> None: ...
    def code(self) -> __ErrorCode:
        """From Triton 23.09 (2.38) on. Return Triton's code; ``INTERNAL`` unless another was given."""

    def message(self) -> str:
        """Return the text."""

class MemoryType(_Enum):
    """From Triton 23.04 (2.33) on. Kinds of memory."""

    TRITONSERVER_MEMORY_GPU: ClassVar[MemoryType]
    TRITONSERVER_MEMORY_CPU: ClassVar[MemoryType]

TRITONSERVER_MEMORY_GPU: MemoryType
"""From Triton 23.04 (2.33) on."""
TRITONSERVER_MEMORY_CPU: MemoryType
"""From Triton 23.04 (2.33) on."""

class PreferredMemory:
    """From Triton 23.04 (2.33) on. Where a model wants the outputs of a model that it calls.

    Parameters
    ----------
    preferred_memory_type
        ``TRITONSERVER_MEMORY_GPU`` or ``TRITONSERVER_MEMORY_CPU``.
    preferred_device_id
        Which GPU.
    """

    def __init__(self, preferred_memory_type: MemoryType, preferred_device_id: int = 0) -> None: ...

class InferenceTrace:
    """From Triton 23.08 (2.37) on. The trace that a request belongs to, to be handed on to requests to other models."""

    def get_context(self) -> str | None:
        """From Triton 24.03 (2.44) on. Return OpenTelemetry's context as JSON text, or None where nothing is traced."""

class Tensor:
    """An input or an output: a name, a shape, a type, and memory.

    ========  ====================  ================================================
    Triton's  NumPy's               remarks
    ========  ====================  ================================================
    BOOL      ``bool``
    UINT8 …   ``uint8`` … 64        UINT8, UINT16, UINT32, UINT64
    INT8 …    ``int8`` … 64         INT8, INT16, INT32, INT64
    FP16 …    ``float16`` … 64      FP16, FP32, FP64
    BYTES     ``object``            arrives as ``bytes``; ``str`` leaves as UTF-8; ``S20`` may leave, too
    BF16      none                  by DLPack alone, from Triton 24.08 (2.49) on
    ========  ====================  ================================================

    Parameters
    ----------
    name
        The input's or the output's, as in the configuration. By position only.
    numpy_array
        Of any shape, which includes the batch. By position only. It is not copied here unless it is not C-contiguous,
        or holds strings, which are serialized here; all else is copied to the pool that the backend shares with the
        server when the response is sent or the request executed. So what is written to it until then counts.

    Raises
    ------
    TritonModelException
        The name is empty. Or the array has a type that Triton has not: complex numbers, ``U``, another byte order.
    TypeError
        ``numpy_array`` is no array of NumPy: lists and scalars are refused.

    Notes
    -----
    A stub process built for NumPy 1 (Triton 2.51's is) reads arrays of NumPy 2 wrongly and without an error. DLPack is
    not affected.
    """

    def __init__(self, name: str, numpy_array: npt.NDArray[Any], /) -> None: ...
    def name(self) -> str:
        """Return the name."""

    def as_numpy(self) -> npt.NDArray[Any]:
        """Return the tensor as an array, the same at each call.

        Of a tensor that was made from an array it is that array, or its C-contiguous copy. Of one that arrived, or was
        made by DLPack, it is a copy that was made with the tensor: it may be kept and written to, and nobody else sees
        what is written. Strings are an array of ``object`` with ``bytes``.

        Raises
        ------
        TritonModelException
            The tensor is on a GPU, or BF16, which NumPy has not.
        """

    def triton_dtype(self) -> NoReturn:
        """Raise ``TypeError``: so far no backend can tell its type this way. Ask :meth:`as_numpy` for its ``dtype``."""

    def shape(self) -> list[int]:
        """From Triton 22.08 (2.25) on. Return the dimensions, with the batch, as a new list."""

    def is_cpu(self) -> bool:
        """Return whether the memory is the CPU's, where NumPy can read it."""

    def to_dlpack(self) -> CapsuleType:
        """Return an unversioned DLPack capsule of the tensor's memory, without a copy.

        Of a tensor that arrived it is the memory of the backend's pool, which is not that of :meth:`as_numpy`. Who
        consumes the capsule keeps the tensor alive. A stream is not waited for.

        Raises
        ------
        TritonModelException
            It holds strings.
        """

    @staticmethod
    def from_dlpack(name: str, tensor: CapsuleType | _HasDLPack, /) -> Tensor:
        """Return a tensor over the memory of another library's, which is kept alive and copied when it is sent.

        On the CPU the array for :meth:`as_numpy` is copied at once. It is a function of the class, though not declared
        as static: called on a tensor it fails.

        Parameters
        ----------
        name
            The input's or the output's. By position only.
        tensor
            C-contiguous, on the CPU or a CUDA GPU. A capsule, without a version; or, from Triton 23.05 (2.34) on, what
            has ``__dlpack__`` and ``__dlpack_device__``, whose work on a GPU is waited for. By position only.

        Raises
        ------
        TritonModelException
            The name is empty; the tensor is not contiguous, or elsewhere; or it is something else.

        Notes
        -----
        The capsule is named ``used_dlpack`` afterwards. A producer whose destructor does not know that name frees it
        twice or never: give NumPy's arrays to ``Tensor`` instead. Strides of a tensor of one dimension are not looked
        at.
        """

    def __dlpack__(self, stream: object = None) -> CapsuleType:
        """From Triton 23.05 (2.34) on. Do what :meth:`to_dlpack` does; ``stream`` is not used."""

    def __dlpack_device__(self) -> tuple[int, int]:
        """From Triton 23.05 (2.34) on. Return DLPack's kind of device, 1 for the CPU and 2 for CUDA, and its number."""

class InferenceRequest:
    """A request: one that a model got to execute, or one that it makes to have another model execute.

    Those that it got are not to be kept after ``execute``. Methods tell what arguments say.

    Parameters
    ----------
    request_id
        Any text.
    correlation_id
        The sequence that it belongs to; 0 or ``""``: none. Text from Triton 24.04 (2.45) on.
    inputs
        Tensors: those of another request, too. They are copied when the request is executed.
    requested_output_names
        What the response shall have.
    model_name, model_version
        Which model; -1 is the newest version.
    flags
        ``TRITONSERVER_REQUEST_FLAG_SEQUENCE_START``, ``…_END``, both or 0. From Triton 22.02 (2.19) on.
    timeout
        In µs; 0: none. It is for the other model's scheduler. From Triton 23.03 (2.32) on.
    preferred_memory
        Where the outputs shall be; where the other model has them, unless said otherwise. From Triton 23.04 (2.33) on.
    trace
        That of a request which it is made for. From Triton 23.08 (2.37) on.
    parameters
        The request's parameters, a ``dict``. Numbers that are not whole are refused. From Triton 23.11 (2.40) on.

    Raises
    ------
    TritonModelException
        An input is None, an output's name is empty, or parameters are no ``dict``, or have other keys or values.
    TypeError
        What else has another type.
    """

    @overload
    def __init__(
        self,
        request_id: str = "",
        correlation_id: int | str = 0,
        *,
        inputs: Sequence[Tensor],
        requested_output_names: Sequence[str],
        model_name: str,
        model_version: int = -1,
        flags: int = 0,
        timeout: int = 0,
        preferred_memory: PreferredMemory = ...,
        trace: InferenceTrace = ...,
        parameters: _Parameters | None = None,
    ) -> None: ...
    @overload
    def __init__(
        self,
        request_id: str,
        correlation_id: int | str,
        inputs: Sequence[Tensor],
        requested_output_names: Sequence[str],
        model_name: str,
        model_version: int = -1,
        flags: int = 0,
        timeout: int = 0,
        preferred_memory: PreferredMemory = ...,
        trace: InferenceTrace = ...,
        parameters: _Parameters | None = None,
    ) -> None: ...
    def inputs(self) -> list[Tensor]:
        """Return the inputs that were sent, as a new list of the same tensors; optional ones may be missing."""

    def request_id(self) -> str:
        """Return the client's id; ``""`` if it gave none."""

    def correlation_id(self) -> int | str:
        """Return the sequence's id; 0 or ``""`` for none. From Triton 24.04 (2.45) on it may be a text."""

    def flags(self) -> int:
        """From Triton 22.02 (2.19) on. Return ``TRITONSERVER_REQUEST_FLAG_…``, added up."""

    def set_flags(self, flags: int, /) -> None:
        """From Triton 22.02 (2.19) on. Set ``TRITONSERVER_REQUEST_FLAG_…``, added up."""

    def timeout(self) -> int:
        """From Triton 23.03 (2.32) on. Return the client's timeout in µs; 0 if it gave none."""

    def parameters(self) -> str:
        """From Triton 23.03 (2.32) on. Return the request's parameters as JSON text, in any order.

        Values are texts, whole numbers, booleans, and numbers. Where there are none it is ``{}``.
        """

    def trace(self) -> InferenceTrace:
        """From Triton 23.08 (2.37) on. Return the trace, for requests to other models."""

    @overload
    def exec(self, decoupled: Literal[False] = False) -> InferenceResponse:
        """Have the other model execute the request, and wait. Other threads of this process go on.

        Parameters
        ----------
        decoupled
            Whether to get an iterator of the responses of a decoupled model. From Triton 23.03 (2.32) on.

        Returns
        -------
        InferenceResponse or ResponseIterator
            With copies of the outputs. All that goes wrong there, a model that is unknown or not ready included, is an
            error of the response, of code ``INTERNAL``.

        Raises
        ------
        TritonModelException
            The model is not executing: it is in ``initialize``, ``finalize`` or ``auto_complete_config``.
        """

    @overload
    def exec(self, decoupled: Literal[True]) -> ResponseIterator: ...
    @overload
    def exec(self, decoupled: bool) -> InferenceResponse | ResponseIterator: ...
    @overload
    def async_exec(self, decoupled: Literal[False] = False) -> Future[InferenceResponse]:
        """Do what :meth:`exec` does in a thread of the running event loop's executor.

        Parameters
        ----------
        decoupled
            Whether to get an iterator of the responses of a decoupled model; to iterate over it blocks. From Triton
            23.03 (2.32) on.

        Raises
        ------
        RuntimeError
            No event loop is running: ``execute`` is not ``async``.
        """

    @overload
    def async_exec(self, decoupled: Literal[True]) -> Future[ResponseIterator]: ...
    @overload
    def async_exec(self, decoupled: bool) -> Future[InferenceResponse] | Future[ResponseIterator]: ...
    def requested_output_names(self) -> set[str]:
        """Return what the client wants; all outputs, if it said nothing. What a response has besides is dropped."""

    def get_response_sender(self) -> InferenceResponseSender:
        """From Triton 22.05 (2.22) on. Return what sends responses, the same at each call.

        Models that are not decoupled may use it from Triton 24.06 (2.47) on, for their one response; ``execute`` then
        returns None in its place. It can be used after ``execute``, in other threads.
        """

    def is_cancelled(self) -> bool:
        """From Triton 23.10 (2.39) on. Return whether the client wants the answer no more."""

    def set_release_flags(self, flags: int, /) -> None:
        """From Triton 23.11 (2.40) on. Say what becomes of a request that was delivered when ``execute`` is done.

        Parameters
        ----------
        flags
            ``TRITONSERVER_REQUEST_RELEASE_ALL``, or ``…_RESCHEDULE`` to get it again in another ``execute``: then its
            response is None. That needs ``sequence_batching { iterative_sequence: true }``. By position only. Requests
            that the model made have no such flags: it is undefined what comes of setting them.
        """

class InferenceResponse:
    """The answer to one request, or one of the answers of a decoupled model. For one request only.

    Parameters
    ----------
    output_tensors
        Outputs; what was not requested is dropped. They are copied when the response is sent, or returned.
    error
        With an error, tensors are ignored.
    parameters
        From Triton 25.02 (2.55) on. The response's parameters, a ``dict``. Numbers that are not whole are refused.

    Raises
    ------
    TritonModelException
        A tensor is None, or parameters are no ``dict``, or have other keys or values.
    TypeError
        What else has another type.
    """

    def __init__(
        self,
        output_tensors: Sequence[Tensor] = [],
        error: TritonError | None = None,
        parameters: _Parameters | None = None,
    ) -> None: ...
    def output_tensors(self) -> list[Tensor]:
        """Return the outputs, as a new list of the same tensors."""

    def has_error(self) -> bool:
        """Return whether the request failed."""

    def error(self) -> TritonError | None:
        """Return why the request failed, or None if it did not."""

    def parameters(self) -> str:
        """From Triton 25.02 (2.55) on. Return the parameters as JSON text; for none it is empty or ``{}``."""

class InferenceResponseSender:
    """From Triton 22.05 (2.22) on. Sends responses to one request."""

    @overload
    def send(self, response: InferenceResponse, flags: int = 0) -> None:
        """Send a response, or say that there are no more, and wait until the server has it.

        Parameters
        ----------
        response
            Its outputs are copied; those that were not requested are dropped.
        flags
            ``TRITONSERVER_RESPONSE_COMPLETE_FINAL`` with the last response, or after it; else 0.

        Raises
        ------
        TritonModelException
            There is neither a response nor a flag; the flag is another one; the last response was sent already; a
            model that is not decoupled sends a second response, or none; or the request is one that this model made.
        """

    @overload
    def send(self, response: InferenceResponse | None, flags: int) -> None: ...
    @overload
    def send(self, response: InferenceResponse | None = None, *, flags: int) -> None: ...
    def is_cancelled(self) -> bool:
        """From Triton 23.10 (2.39) on. Return whether the client wants no more responses."""

class ResponseIterator:
    """From Triton 23.03 (2.32) on. The responses of a decoupled model, as they arrive.

    After the last one it begins anew with the first. The last may have no outputs: the other model has then only said
    that there are no more.
    """

    def __init__(self, response: InferenceResponse, /) -> None: ...
    def __iter__(self) -> ResponseIterator: ...
    def __next__(self) -> InferenceResponse:
        """Wait for a response, and return it. Other threads of this process go on."""

    def cancel(self) -> None:
        """From Triton 25.04 (2.57) on. Say that no more responses are wanted; those that come are to be taken yet."""

class Logger:
    """From Triton 22.09 (2.26) on. The server's log. There are no loggers, only what the class has."""

    class LogLevel(_Enum):
        """From Triton 22.09 (2.26) on. How important a line is."""

        INFO: ClassVar[Logger.LogLevel]
        WARNING: ClassVar[Logger.LogLevel]
        ERROR: ClassVar[Logger.LogLevel]
        VERBOSE: ClassVar[Logger.LogLevel]

    INFO: ClassVar[LogLevel]
    WARNING: ClassVar[LogLevel]
    ERROR: ClassVar[LogLevel]
    VERBOSE: ClassVar[LogLevel]
    @staticmethod
    def log(message: str, level: LogLevel = ...) -> None:
        """Write a line, which names the file and the line that called; ``INFO`` unless said otherwise."""

    @staticmethod
    def log_info(message: str) -> None:
        """Write a line."""

    @staticmethod
    def log_warn(message: str) -> None:
        """Write a warning."""

    @staticmethod
    def log_error(message: str) -> None:
        """Write an error."""

    @staticmethod
    def log_verbose(message: str) -> None:
        """Write a line that only a server with ``--log-verbose`` has in its log."""

class MetricKind(_Enum):
    """From Triton 23.05 (2.34) on. Kinds of metrics, as Prometheus has them."""

    COUNTER: ClassVar[MetricKind]
    GAUGE: ClassVar[MetricKind]
    HISTOGRAM: ClassVar[MetricKind]
    """From Triton 24.08 (2.49) on."""

COUNTER: MetricKind
"""From Triton 23.05 (2.34) on."""
GAUGE: MetricKind
"""From Triton 23.05 (2.34) on."""
HISTOGRAM: MetricKind
"""From Triton 24.08 (2.49) on."""

class Metric:
    """From Triton 23.05 (2.34) on. One series of a family. It goes when its family does.

    All methods raise :class:`TritonModelException` where the kind of the metric has no such thing, or when its family
    is gone.
    """

    def increment(self, value: float, /) -> None:
        """Add a number to a counter or a gauge; a counter takes no negative one."""

    def set(self, value: float, /) -> None:
        """Set a gauge."""

    def observe(self, value: float, /) -> None:
        """From Triton 24.08 (2.49) on. Count a value in a histogram."""

    def value(self) -> float:
        """Return what a counter or a gauge has."""

_Metric: TypeAlias = Metric

class MetricFamily:
    """From Triton 23.05 (2.34) on. Series of the server's metrics port that differ in their labels.

    Keep it as long as its metrics.

    Parameters
    ----------
    name, description
        As Prometheus has them.
    kind
        ``MetricFamily.COUNTER``, ``GAUGE`` or ``HISTOGRAM``.

    Raises
    ------
    TritonModelException
        The server refuses it.
    """

    COUNTER: ClassVar[MetricKind]
    GAUGE: ClassVar[MetricKind]
    HISTOGRAM: ClassVar[MetricKind]
    """From Triton 24.08 (2.49) on."""

    def __init__(self, name: str, description: str, kind: MetricKind) -> None: ...
    def Metric(  # noqa: N802  # its name
        self, labels: dict[str, str] | None = None, buckets: list[float] | list[int] | None = None
    ) -> _Metric:
        """Return a new series.

        Parameters
        ----------
        labels
            Names and values, all texts.
        buckets
            Upper bounds of a histogram's, rising; needed there and nowhere else. From Triton 24.08 (2.49) on.

        Raises
        ------
        TritonModelException
            Labels are no ``dict`` or not texts; buckets are no ``list``, or missing, or not wanted.
        """

def load_model(model_name: str, config: str = "", files: dict[str, bytes] | None = None) -> None:
    """From Triton 23.07 (2.36) on. Load a model, or load it anew, and wait until it is loaded.

    Not in ``auto_complete_config`` or ``finalize``, and not while the server starts.

    Parameters
    ----------
    model_name
        A model of the server's repository, or a new one if there are files.
    config
        Its configuration as JSON, instead of the one in the repository.
    files
        Contents by path, as ``file:1/model.py``; they need ``config``.

    Raises
    ------
    TritonModelException
        It cannot be loaded, or the server does not run with ``--model-control-mode=explicit``.
    """

def unload_model(model_name: str, unload_dependents: bool = False) -> None:
    """From Triton 23.07 (2.36) on. Begin to unload a model, and do not wait.

    Not in ``auto_complete_config`` or ``finalize``, and not while the server starts.

    Parameters
    ----------
    model_name
        The model.
    unload_dependents
        Whether an ensemble's models are to go, too.

    Raises
    ------
    TritonModelException
        The server does not run with ``--model-control-mode=explicit``.
    """

def is_model_ready(model_name: str, model_version: str = "") -> bool:
    """From Triton 23.07 (2.36) on. Return whether a model can be called.

    Ask it of no model that may not be there: the stub frees a refusal before it reads its text, of which servers die.

    Parameters
    ----------
    model_name
        The model.
    model_version
        A whole number as text; ``""`` is the newest version.

    Raises
    ------
    TritonModelException
        The version is no number; from Triton 26.07 (2.71) on also: there is none of that name. Before, it is False.
    """

def async_event_future_done_callback(py_future: ConcurrentFuture[Any]) -> None:
    """From Triton 24.04 (2.45) on. Of the backend itself, for ``async`` models that are decoupled."""

class SharedMemory:
    """From Triton 22.04 (2.21) on. Of the backend itself, for its tests: the pool that it shares with the server."""

    def free_memory(self) -> int:
        """Return how many bytes of it are free."""

shared_memory: SharedMemory
"""From Triton 22.04 (2.21) on."""
