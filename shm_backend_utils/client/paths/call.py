"""A call's memory and its requests: the shape that all paths share."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeGuard

import numpy as np
import numpy.typing as npt

from ...dtypes import BYTES
from ...errors import CallerError, ClosedError, PeerError, TableError
from ...memory.managed import RegionKind
from ...memory.pool.slot import Memory
from ...model_spec import ModelSpec
from ...protocol.call_layout import AnyInput, CallInput, CallLayout
from ...protocol.parameters import SLOT_PARAMETER
from ...protocol.spans import InputSpan
from ..errors import DeadlineExceededError, InferenceError
from ..inputs.sources import Source, source_of
from ..known_model import KnownModel
from ..options import RequestOptions
from ..result import Result
from ..settings import CallSettings
from ..steps import Send, Steps, offloaded
from ..transports.messages import Codec

if TYPE_CHECKING:
    from .on_gpus import OnGpus

__all__ = [
    "COPYING",
    "LONG_COPY",
    "Call",
    "InRegion",
    "Plan",
    "check_sequence_id",
    "is_answer",
    "is_at_least",
    "output_in",
    "write_inputs",
]


LONG_COPY: Final = 4 * 2**20
"""A copy of this many bytes or more takes too long for an event loop, so another thread makes the copy."""

COPYING: Final = "its inputs were being copied"
"""The words of the DeadlineExceededError if a call's deadline passes while its inputs are copied."""


class Plan(NamedTuple):
    """The plan of a call, before it has memory."""

    settings: CallSettings
    known: KnownModel
    layout: CallLayout  # for a region with one slot
    given: Mapping[str, AnyInput]
    wanted: Mapping[str, int | None] | None
    output_devices: Mapping[str, int]

    @property
    def on_host(self) -> CallLayout:
        """The layout for paths that have no memory on GPUs."""
        if not (self.layout.devices or self.layout.lent):
            return self.layout
        on_host = {name: CallInput(each.dtype, each.shape, each.byte_size) for name, each in self.given.items()}
        return self.known.lay_out(on_host, self.wanted)


@dataclass(eq=False, repr=False)
class Call(ABC):
    """Memory for a call's inputs, and the requests that send them, one after another."""

    codec: Codec
    settings: CallSettings
    known: KnownModel
    layout: CallLayout
    wanted: Mapping[str, int | None] | None  # outputs, each with the bytes that the user expects, or None; None for all
    output_devices: Mapping[str, int]

    is_closed: bool = field(default=False, init=False)
    gpus: OnGpus | None = field(default=None, init=False)  # None if all inputs and rooms are on the host

    path = ""
    """``"direct"``, ``"triton-shm"`` or ``"inline"``."""

    @property
    def kind(self) -> RegionKind:
        """The kind of shared memory that holds the call's tensors on the host, if shared memory holds them."""
        return RegionKind.SYSTEM

    @abstractmethod
    def arrays(self) -> dict[str, Any]:
        """Return the host inputs' arrays, which the user fills: numbers are not cleared, strings have dtype object."""

    @abstractmethod
    def write(self, given: Mapping[str, Source]) -> None:
        """Copy inputs to the call's memory on the host; a closed call copies nothing into the pool's memory."""

    @abstractmethod
    def send(self, deadline: float) -> Steps[Result]:
        """Run the model on the present content of the inputs. SlotInDoubtError if an earlier request may still run."""

    def sources(self) -> dict[str, Source]:
        """Return the inputs that this call's memory holds, so that another call can copy them."""
        return {name: source_of(name, array) for name, array in self.arrays().items()}

    def did_not_start(self, refusal: InferenceError) -> bool:
        """Return whether the model certainly has not run: this model, and not one that it calls, refused the path."""
        pattern = f"{TableError.code}: {SLOT_PARAMETER}: .* of model {re.escape(repr(self.known.spec.name))} "
        return re.match(pattern, str(refusal.message())) is not None

    def close(self) -> None:
        """Give the memory back as soon as no array uses it; a second close does nothing."""
        self.is_closed, self.gpus = True, None

    def _check_is_open(self) -> None:
        if self.is_closed:
            raise ClosedError("this call")


class InRegion:
    """A call, or a stream, whose inputs on the host lie in one region of the pool."""

    layout: CallLayout
    memory: Memory
    is_closed = False

    def write(self, given: Mapping[str, Source]) -> None:
        """Copy inputs to their places in the region; a closed call or stream copies nothing."""
        memory = self.memory  # keeps the region in use even if close() comes during the copy
        if self.is_closed:
            return
        spans = self.layout.table.inputs
        for name, source in given.items():
            source.write_to(self._input(memory, spans[name]))

    def _input(self, memory: Memory, span: InputSpan) -> Any:
        dtype, shape, _, offset, byte_size = span
        if dtype is BYTES:
            return memory[offset : offset + byte_size]
        return np.ndarray(shape, dtype.numpy, memory, offset)


def write_inputs(call: Call | InRegion, given: Mapping[str, Source], settings: CallSettings) -> Steps[None]:
    """Copy a call's inputs; for asyncio, a copy that takes long, such as one from a GPU, runs in another thread."""
    if sum(LONG_COPY if source.device is not None else source.byte_size for source in given.values()) < LONG_COPY:
        call.write(given)
    else:
        yield from offloaded(lambda: call.write(given), settings.deadline, COPYING)


def is_answer(error: BaseException) -> TypeGuard[InferenceError]:
    """Return whether the server itself answered with this error, so that the request is over."""
    return isinstance(error, InferenceError) and not isinstance(error, DeadlineExceededError)


def is_at_least(version: tuple[int, int], codec: Codec, deadline: float) -> Steps[bool]:
    """Return whether the server is of this version of Triton, or newer."""
    said = codec.as_dict((yield Send(codec.ask("server metadata"), deadline))).get("version")
    return tuple(int(part) for part in str(said).split(".") if part.isdecimal()) >= version


def check_sequence_id(spec: ModelSpec, options: RequestOptions) -> None:
    """Raise CallerError if a sequence id's type differs from the model's control_input: Triton 2.51 overruns memory."""
    sequence_id = options.get("sequence_id")
    if sequence_id and spec.names_sequences is not None and isinstance(sequence_id, str) != spec.names_sequences:
        raise CallerError(
            f"sequence_id is {sequence_id!r}, but a control_input of model {spec.name!r} has another type; expected "
            f"{'a str' if spec.names_sequences else 'an integer'}"
        )


def output_in(response: Any, name: str) -> npt.NDArray[Any] | None:
    """Return an output as a writable array; None if the response lacks the output, PeerError if it is unreadable."""
    try:
        array: npt.NDArray[Any] | None = response.as_numpy(name)
    except Exception as error:  # tritonclient's, for bytes that contradict their description
        raise PeerError(f"the answer has an output {name!r} that cannot be read: {error}") from None
    if array is not None and array.dtype.hasobject and not all(type(each) is bytes for each in array.flat):
        raise PeerError(f"the answer has an output {name!r} of BYTES whose elements are not bytes: it came as JSON")
    return array if array is None or array.flags.writeable else array.copy()
