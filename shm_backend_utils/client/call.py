"""One call: its tensors laid out in a slot, filled in place, inferred once or many times."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType, TracebackType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from .. import descriptor, dtypes
from ..descriptor import GENERATION_PARAMETER, PARAMETER, Descriptor, InputSpan, OutputSpan
from ..errors import ClosedError, PeerError, SlotInDoubtError, TensorError
from ..spec import ModelSpec
from .pool import Slot, SlotPool
from .result import Result, read_results
from .transport import Request, Transport

__all__ = ["CallPlan", "OutputHint", "PreparedCall", "plan"]

OutputHint = int | tuple[tuple[int, ...], npt.DTypeLike]
"""Room to keep for an output: bytes, or a shape and a dtype."""

_ALIGNMENT: Final = 256
"""Every tensor begins at a multiple of this in its region, which is what ``dlpack.h`` asks of producers."""


@dataclass(frozen=True)
class CallPlan:
    """Where a call's tensors go, as offsets from the beginning of a slot's data."""

    spec: ModelSpec
    batch_size: int | None
    inputs: Mapping[str, InputSpan]
    outputs: Mapping[str, OutputSpan]
    requested: tuple[str, ...] | None
    byte_size: int


def plan(
    spec: ModelSpec,
    inputs: Mapping[str, tuple[tuple[int, ...], npt.DTypeLike]],
    outputs: Sequence[str] | Mapping[str, OutputHint] | None,
    learned: Mapping[str, int],
) -> CallPlan:
    """Lay out a call.

    Parameters
    ----------
    spec : ModelSpec
        The model.
    inputs : mapping
        Name to shape and dtype.
    outputs : sequence of str, mapping, or None
        Names of the outputs that are wanted, with or without a hint of their size; None for all.
    learned : mapping of str to int
        Sizes in bytes that outputs had before, used where neither a hint nor the configuration tells.

    Raises
    ------
    TensorError
        The model does not take these tensors.
    """
    cursor = 0
    input_spans = {}
    for name, (given_shape, numpy_dtype) in inputs.items():
        shape, dtype = tuple(given_shape), dtypes.from_numpy(numpy_dtype, name)
        spec.input(name).check(dtype, shape)
        nbytes = math.prod(shape) * dtype.itemsize
        input_spans[name] = InputSpan(0, cursor, nbytes, dtype, shape)
        cursor = _aligned(cursor + nbytes)
    batch_size = _batch_size(spec, input_spans)
    requested = None if outputs is None else tuple(outputs)
    hints = outputs if isinstance(outputs, Mapping) else {}
    output_spans = {}
    for name in spec.outputs if outputs is None else outputs:
        known = spec.output(name).nbytes(batch_size)
        room = _hinted(name, hints[name]) if name in hints else learned.get(name, 0) if known is None else known
        output_spans[name] = OutputSpan(0, cursor, room)
        cursor = _aligned(cursor + room)
    return CallPlan(spec, batch_size, input_spans, output_spans, requested, cursor)


class PreparedCall:
    """A call with its own memory. A context manager; leaving it gives the memory back once no array needs it.

    Attributes
    ----------
    inputs : mapping of str to numpy.ndarray
        Views of shared memory, to be filled before :meth:`infer`. Not cleared.
    """

    def __init__(
        self,
        call_plan: CallPlan,
        pool: SlotPool,
        transport: Transport,
        request: Callable[[float | None, dict[str, Any]], Request],
        on_overflow: Callable[[Mapping[str, int]], None],
    ) -> None:
        self._plan = call_plan
        self._transport = transport
        self._request = request
        self._on_overflow = on_overflow
        self._slot: Slot
        self._memory: npt.NDArray[np.uint8] | None
        self._slot, self._memory = pool.take(call_plan.byte_size)
        begin = self._slot.data_offset
        inputs = {
            name: InputSpan(0, begin + span.offset, span.byte_size, span.dtype, span.shape)
            for name, span in call_plan.inputs.items()
        }
        outputs = {name: OutputSpan(0, begin + span.offset, span.byte_size) for name, span in call_plan.outputs.items()}
        self.inputs: Mapping[str, npt.NDArray[Any]] = MappingProxyType(
            {
                name: np.ndarray(span.shape, span.dtype.numpy, buffer=self._memory, offset=span.offset)
                for name, span in inputs.items()
            }
        )
        self._descriptor = descriptor.encode(Descriptor(call_plan.spec.name, (self._slot.claim(),), inputs, outputs))

    def infer(self, *, timeout_s: float | None = None) -> Result:
        """Run the model on what is in :attr:`inputs` now. May be called again; arrays of the last result change then.

        Raises
        ------
        InferenceError
            The server refused or failed the request.
        DeadlineExceededError, ServerUnavailableError
            It did not answer. The model may still be executing, or begin to.
        SlotInDoubtError
            It is still executing an earlier request of this call that got no answer.
        PeerError
            The model answered, but not by this protocol.
        """
        if self._memory is None:
            raise ClosedError("this call")
        if self._slot.is_in_doubt and not self._slot.reclaim():
            raise SlotInDoubtError(
                "a request of this call got no answer, and a model is still executing it in this call's memory; infer "
                "again later, or prepare another call"
            )
        generation = self._slot.advance()
        parameters = {PARAMETER: self._descriptor, GENERATION_PARAMETER: generation}
        try:
            response = self._transport.infer(self._request(timeout_s, parameters))
            if not self._slot.is_completed:
                raise PeerError(
                    f"model {self._plan.spec.name!r} answered without having used the shared memory; its config.pbtxt "
                    "declares SHM_PATHS, but does its model.py use ShmSession?"
                )
            result = read_results(self._slot.record.results(), self._memory, response)
        except BaseException:
            self._slot.is_in_doubt = not self._slot.is_completed
            raise
        if result.overflowed:
            self._on_overflow(result.overflowed)
        return result

    def close(self) -> None:
        """Give the memory back, as soon as no array needs it. Twice is fine."""
        self._memory = None
        self.inputs = MappingProxyType({})

    def __enter__(self) -> PreparedCall:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _batch_size(spec: ModelSpec, inputs: Mapping[str, InputSpan]) -> int | None:
    if spec.max_batch_size == 0:
        return None
    sizes = {name: span.shape[0] for name, span in inputs.items()}
    if len(set(sizes.values())) != 1:
        found = ", ".join(f"{name} {size}" for name, size in sizes.items()) or "no input"
        raise TensorError(next(iter(sizes), ""), f"inputs of one request must have one batch size; found {found}")
    name, size = next(iter(sizes.items()))
    spec.check_batch_size(name, size)
    return size


def _hinted(name: str, hint: OutputHint) -> int:
    if isinstance(hint, int):
        if hint < 0:
            raise TensorError(name, f"the hint for output {name!r} is {hint} bytes; expected 0 or more")
        return hint
    shape, dtype = hint
    return math.prod(shape) * dtypes.from_numpy(dtype, name).itemsize


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT
