"""Every error of this package, sorted by whose fault it is.

::

    ShmError
    ├── CallerError            what was asked for is wrong; ask differently
    │   ├── DescriptorError    the request parameter ``shm_io``
    │   ├── TensorError        a tensor, in one of these respects:
    │   │   ├── TensorNameError, TensorTypeError, TensorShapeError, BatchSizeError, MissingTensorError
    │   ├── RegionRefusedError memory that was named, but may not be opened
    │   └── ClosedError        an object was used after it was closed
    ├── PeerError              the other process broke off or broke the contract
    │   ├── SlotInDoubtError   the model may still be writing to this call's memory
    │   ├── RegionGoneError    the memory is no longer there
    │   ├── StaleRequestError  the client gave this request up
    │   ├── ReplayedRequestError  this request was executed before
    │   ├── ForwardError       another model, called on behalf of this request, failed
    │   ├── RequestCancelledError  the client does not want the answer any more
    │   └── StalledStreamError the client reads its stream no further
    ├── ModelError             ``model.py`` or its ``config.pbtxt`` is wrong
    │   └── DeviceMemoryError  a tensor is on the GPU, or is not, other than the code that uses it assumes
    └── MachineError           the machine lacks something: memory, a server, a library

A message says what was looked at, what was found, what was expected and what to do. Messages reach remote callers,
so none of them holds a shared-memory key, a token or a path.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "BatchSizeError",
    "CallerError",
    "ClosedError",
    "DescriptorError",
    "DeviceMemoryError",
    "ForwardError",
    "MachineError",
    "MissingTensorError",
    "ModelError",
    "PeerError",
    "RegionGoneError",
    "RegionRefusedError",
    "ReplayedRequestError",
    "RequestCancelledError",
    "ShmError",
    "SlotInDoubtError",
    "StaleRequestError",
    "StalledStreamError",
    "TensorError",
    "TensorNameError",
    "TensorShapeError",
    "TensorTypeError",
]


class ShmError(Exception):
    """The base of every error that this package raises on purpose."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Let errors cross process pools, whatever their constructors take."""
        return _restored, (type(self), self.args, self.__dict__)


def _restored(kind: type[ShmError], arguments: tuple[Any, ...], state: dict[str, Any]) -> ShmError:
    error = kind.__new__(kind)
    error.args = arguments
    error.__dict__.update(state)
    return error


class CallerError(ShmError):
    """What was asked for cannot be done as asked. Asking again in the same way fails again."""


class DescriptorError(CallerError, ValueError):
    """The request parameter ``shm_io`` is not a valid descriptor, or ``shm_generation`` not a valid generation.

    You get it for a descriptor that contradicts the protocol or itself. You do not get it for a valid descriptor of
    memory that may not be opened (:class:`RegionRefusedError`) or of tensors that the model does not take
    (:class:`TensorError`).

    Parameters
    ----------
    field : str
        Path of the offending field below the parameter, for example ``inputs.IMAGE[1]``; empty for the whole.
    found, expected : str
        What stood there, in words that disclose no secret, and what should have.
    parameter : str
        The request parameter.
    """

    def __init__(self, field: str, found: str, expected: str, parameter: str = "shm_io") -> None:
        self.field = field
        self.found = found
        self.expected = expected
        place = f"{parameter}.{field}" if field else parameter
        super().__init__(f"request parameter {place}: found {found}, expected {expected}")


class TensorError(CallerError, ValueError):
    """A tensor is missing, unknown, or has a dtype or shape that the model does not take."""

    def __init__(self, tensor: str, message: str) -> None:
        self.tensor = tensor
        super().__init__(message)


class TensorNameError(TensorError, KeyError):
    """The model has no input, or no output, of this name."""

    __str__ = Exception.__str__  # KeyError would show the message in quotes


class TensorTypeError(TensorError, TypeError):
    """A tensor's data type is not the model's."""


class TensorShapeError(TensorError):
    """A tensor's shape is not one that the model takes."""


class BatchSizeError(TensorShapeError):
    """A request has more rows than the model takes at once, or its inputs differ in them."""


class MissingTensorError(TensorError):
    """The model needs an input that the request does not have."""


class RegionRefusedError(CallerError, PermissionError):
    """A region was named that this process may not, or will not, open.

    Parameters
    ----------
    field : str
        The descriptor's field that names the region, for example ``regions[0]``.
    reason : str
        The rule that refused it. Holds no key, token or path.
    """

    def __init__(self, field: str, reason: str) -> None:
        self.field = field
        self.reason = reason
        super().__init__(f"{field} refused: {reason}")

    __str__ = Exception.__str__  # OSError would show its arguments as an errno and a file name


class ClosedError(CallerError, RuntimeError):
    """An object was used after *you* closed it."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what} is closed; make a new one")


class PeerError(ShmError):
    """The process at the other end died, gave up, or broke the contract."""


class SlotInDoubtError(PeerError):
    """A call's memory cannot be used again yet: a request that got no answer may still be executed in it.

    You get it from a prepared call that is inferred again too soon. ``ShmClient.infer`` takes other memory instead.
    """


class RegionGoneError(PeerError, FileNotFoundError):
    """The memory that a descriptor names does not exist, or not any more: its owner removed it or died."""

    __str__ = Exception.__str__


class StaleRequestError(PeerError):
    """The client has given this request up and may be using its memory for another one. Nothing was written."""


class ReplayedRequestError(PeerError):
    """This request was executed before. A generation of a slot is executed at most once. Nothing was written."""


class ForwardError(PeerError):
    """Another model, which ``call.forward`` called, refused or failed the request."""


class RequestCancelledError(PeerError):
    """The client has cancelled the request, or is gone."""


class StalledStreamError(PeerError, TimeoutError):
    """The client holds every frame of its ring and releases none."""


class ModelError(ShmError):
    """``model.py`` or ``config.pbtxt`` contradicts itself. The model's author can mend it; the caller cannot."""


class DeviceMemoryError(ModelError, TypeError):
    """A tensor is in a GPU's memory and was used as if it were in the host's, or the other way round."""


class MachineError(ShmError):
    """The machine lacks something that is needed; the message says how to provide it."""
