"""One request of a decoupled model: any number of responses, each in the next place of the client's ring."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any, Final

from ..errors import ModelError, RequestCancelledError, StalledStreamError
from ..protocol.ring import frame_number
from .call import Call
from .direct import Frame
from .instance import Instance
from .outputs import Outputs

__all__ = ["StreamCall"]

_SHORTEST_PAUSE_S: Final = 50e-6
_LONGEST_PAUSE_S: Final = 1e-3
_LOOK_AT_CLIENT_S: Final = 0.02


class StreamCall(Call):
    """One request of a decoupled model. A context manager: leaving it ends the stream.

    An exception that leaves the block has become the client's answer, and goes on.

    Outputs are written as in any call; :meth:`send` sends those that were written since the last one. In the client's
    ring, a frame is overwritten only when the client has released it. Without a ring, responses go through Triton.
    """

    __slots__ = ("_index", "_looked", "_patience_s", "_sender")

    def __init__(self, instance: Instance, request: Any, patience_s: float) -> None:
        super().__init__(instance, request)
        self._sender = instance.backend.sender(request)
        self._patience_s = patience_s
        self._index = 0
        self._looked = time.monotonic()

    def send(self) -> None:
        """Send a response with the outputs that were written since the last one; it may be none.

        Raises
        ------
        RequestCancelledError
            The client does not want it any more, or is gone.
        StalledStreamError
            It holds all frames of its ring, and has released none within ``SHM_STREAM_PATIENCE_S``.
        """
        outputs = self._open_outputs().finish_some(self._incoming.requested)
        if self.devices:
            self._arrays.synchronize(sorted(self.devices))
        response = self._backend.response(self._tensors(outputs))
        frame = self._frame
        if frame is not None:
            frame.record.complete(frame_number(self._generation, self._index), frame.places.results(outputs))
        self._backend.send(self._sender, response)
        self._used_devices |= self.devices
        self._outputs = None
        self._index += 1
        self._look_at_client()

    def __enter__(self) -> StreamCall:
        try:
            super().__enter__()
        except Exception as error:
            self._backend.send_last(self._sender, self._backend.error_response(error))
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._end_by_error(error)
            return
        try:
            self._check_nothing_is_pending()
        except ModelError as early:
            self._end_by_error(early)
            raise
        self._results = b"{}"
        self.end()
        self._backend.send_last(self._sender)

    def _end_by_error(self, error: BaseException) -> None:
        self._fail()
        response = None
        if isinstance(error, Exception) and not isinstance(error, RequestCancelledError):
            response = self._backend.error_response(error)
        self._backend.send_last(self._sender, response)

    @property
    def _frame(self) -> Frame | None:
        """The place of the next response; None if it goes through Triton."""
        frames = [] if self._direct is None else self._direct.plan.frames
        return frames[self._index % len(frames)] if frames else None

    def _first_outputs(self) -> Outputs | None:
        return None

    def _open_outputs(self) -> Outputs:
        self._check_open()
        if self._outputs is None:
            frame = self._frame
            if frame is not None:
                self._wait_until_released(frame)
            self._outputs = Outputs(self._spec, self._arrays, None if frame is None else frame.places)
        return self._outputs

    def _wait_until_released(self, frame: Frame) -> None:
        """Wait until the client reads what is in this place no more."""
        assert self._direct is not None
        last = self._index - len(self._direct.plan.frames)
        if last < 0:
            return  # nothing of this stream is there
        number = frame_number(self._generation, last)
        begin = time.monotonic()
        pause_s = _SHORTEST_PAUSE_S
        while frame.record.generation < number:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            self._look_at_client()
            if time.monotonic() - begin > self._patience_s:
                raise StalledStreamError(
                    f"the client holds all {len(self._direct.plan.frames)} frames of its stream and has released none "
                    f"for {self._patience_s:g} s: release results, or copy what is to be kept, or ask for more frames"
                )

    def _look_at_client(self) -> None:
        """Raise if the client does not want more. Asking takes time, so it is not asked at every turn."""
        now = time.monotonic()
        if now - self._looked < _LOOK_AT_CLIENT_S:
            return
        self._looked = now
        mapped = [] if self._direct is None else self._direct.plan.mapped
        if self.cancelled or any(region.is_abandoned for region in mapped):
            raise RequestCancelledError("the client does not want the rest of the stream")
