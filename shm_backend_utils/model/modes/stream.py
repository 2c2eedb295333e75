"""One request of a decoupled model: any number of responses, each in the next place of the client's ring."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Final

import numpy.typing as npt

from ...errors import ModelError, RequestCancelledError, StalledStreamError, TableError
from ...protocol import results
from ...protocol.layout import SlotRecord
from ...protocol.spans import OutputSpan, Ring, frame_number
from ...tensors.view import TensorView
from ..call import Call
from ..context import Context
from ..forward.forwarder import check_all_are_over

__all__ = ["StreamCall", "run_stream"]

_SHORTEST_PAUSE_S: Final = 50e-6
_LONGEST_PAUSE_S: Final = 1e-3
_LOOK_AT_CLIENT_S: Final = 0.02
_NO_OUTPUTS: Final = results.assemble(())


class StreamCall(Call):
    """One request of a decoupled model. A context manager: its exit ends the stream.

    The exit raises ModelError if an output was written and not sent. An exception in the block goes to the client as
    the error of the stream, and propagates.

    Write outputs as in any call; :meth:`send` sends those that you wrote since the last response. A frame in the
    client's ring is overwritten only after the client has released it. Without a ring, responses go through Triton.
    """

    _made_by = "stream"
    _public_name = "StreamCall"

    def __init__(self, context: Context, request: Any) -> None:
        super().__init__(context, request)
        self._sender = request.get_response_sender()
        self._frames: list[tuple[SlotRecord, Mapping[str, OutputSpan]]] = []  # each place of the ring, and its outputs
        self._record: SlotRecord | None = None  # the record in the place of the next response
        self._index = 0
        self._is_frame_open = False
        self._looked = time.monotonic()
        self._waited_s = 0.0

    def begin(self) -> None:
        """Accept the request; ModelError also if the model is not decoupled."""
        if not self.spec.is_decoupled:
            raise ModelError(
                f"model {self.spec.name!r} is not decoupled, so it has no streams; write `model_transaction_policy "
                "{ decoupled: true }` in its config.pbtxt, or use serve"
            )
        super().begin()
        self._requested = self._request.requested_output_names()
        self._rooms = {}  # each response has rooms of its own
        self._has_results = bool(self._frames)

    def output(self, name: str, shape: Sequence[int], dtype: npt.DTypeLike) -> TensorView:
        """Return memory for one output of the next response, as :meth:`Call.output` does: a place in the client's ring.

        It waits until the client has released the old frame in this place, and raises the errors of :meth:`send`. After
        :meth:`send` the memory is the client's until the client releases it.
        """
        if not self._is_frame_open:
            self._open_frame()
        return super().output(name, shape, dtype)

    def put(self, name: str, array: Any) -> None:
        """Set one output of the next response, as :meth:`Call.put` does. Waits for a place, as :meth:`output` does."""
        if not self._is_frame_open:
            self._open_frame()
        super().put(name, array)

    def send(self) -> None:
        """Send a response with the outputs that you wrote since the last one. It may have none.

        Raises
        ------
        RequestCancelledError
            The client has cancelled or given up the stream, or is gone.
        StalledStreamError
            The client holds all frames of its ring, and has released none within ``SHM_STREAM_PATIENCE_S``. Or the
            stream has waited for ``SHM_STREAM_TOTAL_PATIENCE_S`` in total.
        ShmError
            The call is over, or an output cannot be written.
        """
        if not (self._is_frame_open and self._is_open):
            self._open_frame()
        self.commit(needs_all=False)
        if self.devices:
            self.devices.wait()
        if self._record is not None:
            self._record.complete(frame_number(self._generation, self._index), self._results)
        self._sender.send(self.response)
        self.outputs = {}
        self.response = None
        self._index += 1
        self._is_frame_open = False
        self._look_at_client()

    def _progress(self) -> str:
        return f" sent={self._index}"

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        if error is None:
            self._context.backend.send_last(self._sender)

    def fail(self, error: BaseException) -> None:
        """End the stream with an error, which the client gets unless it has cancelled the stream."""
        super().fail(error)
        is_wanted = not isinstance(error, RequestCancelledError)
        self._context.backend.send_last(self._sender, self.response if is_wanted else None)

    def _finish(self) -> None:
        if self.outputs:
            names = ", ".join(self.outputs)
            raise ModelError(
                f"model.py wrote {names} and sent no response with it; yield, or call.send(), after the last output"
            )
        if self._pending:
            check_all_are_over(self._pending)
        self._results = _NO_OUTPUTS

    def _take_ring(self, ring: Ring, outputs: Mapping[str, OutputSpan]) -> None:
        """Find the records and the outputs of the ring's frames."""
        slot = self._slot
        assert slot is not None  # a descriptor of named regions has no ring
        region = slot.region.managed
        assert region is not None
        last, count = ring.slot + ring.frames - 1, region.header.slot_count
        if last >= count or ring.slot <= slot.number <= last:
            found = f"slots {ring.slot} to {last}"
            raise TableError("frame_slot", found, f"slots of 0 to {count - 1}, except for the request's own")
        for name in outputs:  # refuse unknown outputs before laying out every place
            self.spec.output(name)
        self._frames = [
            (region.record(ring.slot + place), ring.outputs(outputs, place)) for place in range(ring.frames)
        ]

    def _open_frame(self) -> None:
        """Wait until the model may write to the place of the next response."""
        self._check_open()
        if self._frames:
            record, rooms = self._frames[self._index % len(self._frames)]
            last = self._index - len(self._frames)
            if last >= 0:
                self._wait_until_released(record, frame_number(self._generation, last))
            self._record, self._rooms = record, rooms
        self._is_frame_open = True

    def _wait_until_released(self, record: SlotRecord, number: int) -> None:
        """Wait until the client has released the frame in the place of this record."""
        begin, config = time.monotonic(), self._context.config
        waited_s, pause_s = 0.0, _SHORTEST_PAUSE_S
        while record.generation < number:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            self._look_at_client()
            waited_s = time.monotonic() - begin
            if waited_s > config.stream_patience_s:
                frames, most_s = len(self._frames), config.stream_patience_s
                what = f"the client holds all {frames} frames of its stream and has released none for {most_s:g} s"
                raise _stalled(what, "SHM_STREAM_PATIENCE_S")
            if self._waited_s + waited_s > config.stream_total_patience_s:
                most_s = config.stream_total_patience_s
                what = f"the stream has waited for its client for {most_s:g} s altogether, as it released frames late"
                raise _stalled(what, "SHM_STREAM_TOTAL_PATIENCE_S")
        self._waited_s += waited_s

    def _look_at_client(self) -> None:
        """Raise RequestCancelledError if the client has cancelled; ask only now and then, because asking takes time."""
        now = time.monotonic()
        if now - self._looked < _LOOK_AT_CLIENT_S:
            return
        self._looked = now
        slot = self._slot
        is_given_up = slot is not None and (slot.region.is_abandoned or slot.record.generation != self._generation)
        if self.cancelled or is_given_up:
            raise RequestCancelledError("the client does not want the rest of the stream")


def _stalled(what: str, parameter: str) -> StalledStreamError:
    return StalledStreamError(
        f"{what}: release results, or copy the values to keep, or ask for more frames; the model's parameter "
        f"{parameter} sets the wait"
    )


def run_stream(stream: StreamCall, answer: Callable[[StreamCall], Iterable[object] | None]) -> None:
    """Serve a stream: send outputs whenever ``answer`` yields, and end the stream when ``answer`` ends or fails."""
    with stream as call:
        steps = answer(call)
        # No ExitStack: there, an error from closing the generator would form a reference cycle that keeps the stream.
        with contextlib.closing(steps) if isinstance(steps, Generator) else contextlib.nullcontext():
            for value in steps or ():
                if value is not None:
                    raise ModelError(
                        f"model.py has yielded a value of type {type(value).__name__}, which is not sent; write "
                        "outputs by call.put(name, array), then yield without a value"
                    )
                call.send()
