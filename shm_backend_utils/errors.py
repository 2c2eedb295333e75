"""The errors that both halves share, their codes in refusals, and a translator of other libraries' errors.

The classes below :class:`ShmError` say whose fault an error is: caller, peer, model, machine.
A message names the object, the value found, the value expected and the remedy. No message for a remote caller
contains a shared-memory key, a token or a path. The text for a remote caller begins with the class's ``code``. Both
halves branch on that code, never on prose.
"""

from __future__ import annotations

import contextlib
import difflib
import numbers
import re
import reprlib
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, ClassVar, Final, Generic, TypeVar

__all__ = [
    "BatchSizeError",
    "BudgetError",
    "CallerError",
    "ClosedError",
    "DeviceMemoryError",
    "ForwardError",
    "MachineError",
    "MissingTensorError",
    "ModelError",
    "NoSharedMemoryError",
    "PeerError",
    "PoolExhaustedError",
    "ProbedError",
    "RegionGoneError",
    "RegionRefusedError",
    "ReplayedRequestError",
    "RequestCancelledError",
    "RequestRefusedError",
    "ShmError",
    "SlotInDoubtError",
    "SlotInUseError",
    "StaleRequestError",
    "StalledStreamError",
    "TableError",
    "TensorError",
    "TensorNameError",
    "TensorShapeError",
    "TensorTypeError",
    "VersionError",
]

E = TypeVar("E", bound=BaseException)


class ShmError(Exception):
    """The base of every error that this package raises on purpose."""

    code: ClassVar[str] = "shm:error"

    def __reduce__(self) -> tuple[Any, ...]:
        """Make errors picklable for process pools, whatever arguments their constructors take."""
        return _restored, (type(self), self.args, self.__dict__)


def name_list(wrong: object, names: Iterable[str]) -> str:
    """Return the known names, for a message about an unknown one, with the closest match if one is similar."""
    there = list(names)
    if not isinstance(wrong, str) or len(wrong) > _LONGEST_NAME:  # comparing long names takes time
        return ", ".join(there) or "none"
    alike = {name.casefold(): name for name in there}
    meant = difflib.get_close_matches(wrong.casefold(), alike, 1)
    return (", ".join(there) or "none") + (f"; did you mean {alike[meant[0]]!r}?" if meant else "")


_LONGEST_NAME: Final = 64


def shown(value: object) -> str:
    """Return a wrong value as short text for a message: one line, without memory addresses or elements of arrays."""
    if not all(map(_is_literal, value if isinstance(value, tuple | list) else (value,))):
        return f"an object of type {type(value).__name__}"
    try:
        return reprlib.repr(value)
    except ValueError:  # an integer of more digits than Python prints
        return "a number too long to print"


def _is_literal(value: object) -> bool:
    import numpy as np  # noqa: PLC0415  # these errors must also work before NumPy is installed

    return isinstance(value, str | bytes | numbers.Number | np.generic | None)


def _restored(kind: type[ShmError], arguments: tuple[Any, ...], state: dict[str, Any]) -> ShmError:
    error = kind.__new__(kind)
    error.args = arguments
    error.__dict__.update(state)
    return error


class CallerError(ShmError):
    """The call is wrong. The same call will fail again."""

    code = "shm:caller"


class TableError(CallerError, ValueError):
    """A request's description of its slot and its tensors breaks the protocol, or contradicts itself.

    Its attributes are ``field``, for example ``inputs[0].offset``, ``found`` and ``expected``. A valid table of memory
    that the model may not open, or of tensors that it does not take, causes other errors.
    """

    code = "shm:table"

    def __init__(self, field: str, found: str, expected: str) -> None:
        self.field = field
        self.found = found
        self.expected = expected
        super().__init__(f"{field}: found {found}, expected {expected}")


class VersionError(TableError):
    """A client and a model speak different versions of the protocol."""

    code = "shm:version"

    def __init__(self, found: str, spoken: int) -> None:
        super().__init__(
            "the request's protocol version",
            found,
            f"{spoken}, which this model's shm_backend_utils speaks; install the same release for client and model",
        )


class TensorError(CallerError, ValueError):
    """A tensor is missing, unknown, or has a dtype or shape that the model does not take."""

    code = "shm:tensor"

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
    """A request has no rows, or more than the model takes at once, or its inputs have different numbers of rows."""


class MissingTensorError(TensorError):
    """The model needs an input that the request does not have."""

    code = "shm:missing"


class RegionRefusedError(CallerError, PermissionError):
    """This process may not, or will not, open a region: ``field`` names the region, and ``reason`` says why."""

    code = "shm:refused"

    def __init__(self, field: str, reason: str) -> None:
        self.field = field
        self.reason = reason
        super().__init__(f"{field} refused: {reason}")

    __str__ = Exception.__str__  # OSError would show its arguments as an errno and a file name


class ClosedError(CallerError, RuntimeError):
    """An object was used after *you* closed it."""

    code = "shm:closed"

    def __init__(self, what: str, remedy: str = "make a new one") -> None:
        super().__init__(f"{what} is closed; {remedy}")


class RequestRefusedError(CallerError):
    """``model.py`` raises it to refuse a request: the client gets its text and its status, and nothing else.

    Parameters
    ----------
    message : str
        The text for the client.
    status : str
        Triton's name for the kind of error, one of :attr:`STATUSES`. Over gRPC it becomes the status of the call.
    """

    STATUSES: Final = (
        *("UNKNOWN", "INTERNAL", "NOT_FOUND", "INVALID_ARG", "UNAVAILABLE", "UNSUPPORTED", "ALREADY_EXISTS"),
        "CANCELLED",
    )

    def __init__(self, message: str, status: str = "INVALID_ARG") -> None:
        if status not in self.STATUSES:
            expected = name_list(status, self.STATUSES)
            raise ModelError(f"model.py refuses a request with status {shown(status)}; expected one of {expected}")
        self.status = status
        super().__init__(message)


class PeerError(ShmError):
    """The process at the other end died, gave up, or broke the contract."""

    code = "shm:peer"


class SlotInDoubtError(PeerError):
    """A call's memory cannot be used again yet: a model may still be executing an unanswered request in it.

    You get it if you run a prepared call again too soon. ``ShmClient.infer`` takes other memory instead.
    """


class RegionGoneError(PeerError, FileNotFoundError):
    """The memory that a request names does not exist here: its owner removed it, died, or does not share it."""

    code = "shm:gone"

    __str__ = Exception.__str__


class StaleRequestError(PeerError):
    """The client gave up this request, and may use its memory for another one. Nothing was written."""

    code = "shm:stale"


class SlotInUseError(PeerError):
    """Another model holds the slot's lock, or the client does while it reclaims the slot. Nothing was written."""

    code = "shm:busy"


class ReplayedRequestError(PeerError):
    """This request was executed before: each generation of a slot is executed at most once. Nothing was written."""

    code = "shm:replayed"


class ProbedError(PeerError):
    """The request is a probe or Triton's filler for an empty slot, not for ``model.py``. It counts as no refusal."""

    code = "shm:probed"


class ForwardError(PeerError):
    """A model that ``call.forward`` called refused or failed the request; ``status`` is Triton's, if it is known."""

    code = "shm:forward"

    def __init__(self, message: str, status: str = "INTERNAL") -> None:
        self.status = status
        super().__init__(message)


class RequestCancelledError(PeerError):
    """The client has cancelled the request, or is gone."""

    code = "shm:cancelled"


class StalledStreamError(PeerError, TimeoutError):
    """The client holds every frame of its stream, and released none in time."""

    code = "shm:stalled"


class ModelError(ShmError):
    """``model.py`` or ``config.pbtxt`` contradicts itself. The model's author can fix it; the caller cannot."""

    code = "shm:model"


class DeviceMemoryError(ModelError, TypeError):
    """A tensor is in a GPU's memory and was used as if it were in the host's, or the other way round."""


class BudgetError(CallerError, ValueError):
    """The call needs more shared memory than the pool may ever have."""


class MachineError(ShmError):
    """The machine lacks something that this library needs; the message says how to provide it."""

    code = "shm:machine"


class NoSharedMemoryError(MachineError):
    """Shared memory, or a file descriptor for it, is not available. With ``path="auto"``, a call tries another path."""


class PoolExhaustedError(MachineError, TimeoutError):
    """All the shared memory that the pool may have is held, and none of it became free in time."""


NOT_OPENED: Final = frozenset({RegionGoneError.code, RegionRefusedError.code})
"""The codes which say that a model could not open the memory: the call may succeed with other memory."""

# Triton may put a request's id and an ensemble's name in front of the code. No other text may stand there, because an
# error of model.py may quote another request's code.
_CODE: Final = re.compile(r"(?:\[[^]]*\] |in ensemble '[^']*', )*(shm:[a-z]+): ")


def refusal(error: ShmError) -> str:
    """Return the text of an error for a remote caller: its code, a colon and its message."""
    return f"{error.code}: {error}"


def code_in(text: str) -> str:
    """Return the refusal code that an error's text begins with, for example ``"shm:stale"``, or an empty string."""
    found = _CODE.match(text)
    return "" if found is None else found[1]


class translate(contextlib.ContextDecorator, Generic[E]):  # noqa: N801  # a verb in lower case, like contextlib's own
    """Replace errors of these kinds, in a block or a function, by the result of ``meaning``; None keeps the error.

    It is a class because, from Python 3.12 on, a generator as a context manager would put the error into a reference
    cycle with all its frames. Their memory would then stay mapped until the garbage collector runs.
    """

    def __init__(self, kinds: type[E] | tuple[type[E], ...], meaning: Callable[[E], BaseException | None]) -> None:
        self._kinds = kinds
        self._meaning = meaning

    def __enter__(self) -> None:
        """Begin the block."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the block, and raise the translation of its error if it has one."""
        if not isinstance(error, self._kinds):
            return
        translated = self._meaning(error)
        try:
            if translated is not None:
                raise translated from None
        finally:
            del translated, error  # the traceback refers to this frame
