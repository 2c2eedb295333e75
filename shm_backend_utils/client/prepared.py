"""Prepared calls: memory that the user fills in place, inferred once or many times."""

from __future__ import annotations

import threading
import time
from collections.abc import Coroutine, Mapping
from typing import Any, Final, Generic, NoReturn, TypeVar

import numpy.typing as npt

from ..errors import CallerError, ClosedError
from ..gpu.streams import Named, named
from ..process import Unclosed
from .calls import infer_prepared
from .core import Core
from .errors import ForkedError
from .options import check_timeout
from .paths.call import Call
from .result import Arrays, Result
from .steps import Steps

__all__ = ["CLOSE_OR_WITH", "AsyncPreparedCall", "OfThisProcess", "PreparedCall"]


class OfThisProcess:
    """Cannot be pickled: neither connections nor memory go with it."""

    __slots__ = ()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} objects cannot be pickled: they belong to the process that made them; make a "
            "client in each process"
        )


CLOSE_OR_WITH: Final = "call close(), or use it in a with statement"

ResultT = TypeVar("ResultT")
Self = TypeVar("Self", bound="Prepared[Any]")


class Prepared(OfThisProcess, Generic[ResultT]):
    """A call with its own memory. A context manager; leaving it gives the memory back once no array needs it."""

    def __init__(self, core: Core, call: Call, timeout_s: float, driver: Any) -> None:
        self._core = core
        self._call = call
        self._timeout_s = timeout_s
        self._driver = driver
        self._named: Named = ()
        on_gpus = {} if call.gpus is None else call.gpus.arrays(call)
        self._inputs: Mapping[str, Any] = Arrays(call.arrays() | on_gpus)
        self._in_use = threading.Lock()
        origin = call.settings.origin._replace(what=f"the {type(self).__name__} made")
        self._unclosed = Unclosed(origin, CLOSE_OR_WITH, lambda: None if core.is_closed else "")

    @property
    def inputs(self) -> Mapping[str, npt.NDArray[Any]]:
        """Arrays to be filled before :meth:`infer`: C-contiguous, writable, not cleared; or tensors that were given.

        They are views of shared memory, unless the path is inline, of the shapes and dtypes that were given to
        ``prepare``; strings are arrays of objects. Fill them by ``call.inputs["X"][...] = array``. Those on GPUs are of
        the ``library`` that ``prepare`` was given, to be filled in its way, or else of :class:`DeviceArray`, over which
        a library makes its own: ``torch.from_dlpack(call.inputs["X"])``. They serve until the call is closed, and stay
        valid after that, though no request reads them any more. To ask for one then is a ClosedError, as in a forked
        child, whose parent has the memory.
        """
        if self._core.is_forked:
            raise ForkedError("this call")
        return self._inputs

    @property
    def path(self) -> str:
        """``"direct"``, ``"triton-shm"`` or ``"inline"``: the way that the tensors go."""
        return self._call.path

    def infer(
        self, *_inputs: NoReturn, timeout_s: float | None = None, cuda_stream: Any = None, **_options: NoReturn
    ) -> ResultT:
        """Run the model on the contents of :attr:`inputs`; may be called again. Arrays of the last result change then.

        An output that found no room, as one of unknown size may, came back through Triton. Before the next request the
        call takes memory for as much, if there is some at once; its inputs stay where they are.

        Parameters
        ----------
        timeout_s : float, optional
            How long to wait for the answer, in seconds; by default the one given to ``prepare``.
        cuda_stream : object, optional
            As of :meth:`inputs_ready`. Outputs that the model's GPU is still writing are waited for there.

        Returns
        -------
        Result
            Its arrays are views of this call's memory: the next :meth:`infer` writes over them, except for those that
            it takes other memory for. An output that the model passes on from an input lies where that input does, so
            filling the input anew changes it. Copy the values that you keep, for example by :meth:`Result.copy`.

        Raises
        ------
        InferenceError, DeadlineExceededError, ServerUnavailableError, PeerError
            As of :meth:`ShmClient.infer`. Without an answer, the model may still be executing, or begin to.
        SlotInDoubtError
            It may still be executing an earlier request of this call, which got no answer.
        CallerError
            Another thread is inferring this call.
        """
        if _inputs or _options:
            raise TypeError(
                "infer() of a prepared call takes timeout_s and cuda_stream alone; write call.inputs['INPUT0'][...] = "
                "array, and give options to prepare()"
            )
        return self._driver.run(self._infer(timeout_s, cuda_stream), self._core.tally)

    def inputs_ready(self, cuda_stream: Any) -> None:
        """Name the work on GPUs that the next request waits for, in place of all of this process's work there.

        ``cuda_stream`` has the streams of your work that writes the inputs, or still reads arrays of earlier results.
        As in :meth:`ShmClient.infer` it is a stream, an event recorded behind that work, or a sequence of these.
        """
        if self._call.is_closed:
            raise ClosedError("this call")
        self._named = named(cuda_stream)

    def close(self) -> None:
        """Give the memory back, as soon as no array needs it. Twice is fine."""
        self._unclosed.close()
        self._inputs = Arrays(None)
        self._call.close()

    def __repr__(self) -> str:
        call = self._call
        state = "closed" if call.is_closed else self._core.state
        spans = call.layout.table.inputs.items()
        inputs = "".join(f" {name!r} {span.dtype.name} {list(span.shape)}," for name, span in spans)
        return f"<{type(self).__name__} {call.settings.model!r} path={call.path}{inputs} {state}>"

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _infer(self, timeout_s: float | None, cuda_stream: Any) -> Steps[Result]:
        if cuda_stream is not None:
            self.inputs_ready(cuda_stream)
        deadline = time.monotonic() + (self._timeout_s if timeout_s is None else check_timeout(timeout_s))
        if self._core.is_forked:
            raise ForkedError("this call")
        if not self._in_use.acquire(blocking=False):
            raise CallerError(
                "this prepared call is being inferred already, by another thread or task, and has one memory; prepare "
                "one call for each thread or task"
            )
        try:
            if self._call.gpus is not None:
                self._call.gpus.named = self._named
            self._named = ()
            return (yield from infer_prepared(self._core, self._call, deadline))
        finally:
            self._in_use.release()


class PreparedCall(Prepared[Result]):
    """A call with its own memory, of a :class:`ShmClient`. One thread at a time may infer it."""


class AsyncPreparedCall(Prepared[Coroutine[Any, Any, Result]]):
    """A call with its own memory, of an :class:`AsyncShmClient`: as a :class:`PreparedCall`, with ``await``.

    Inputs must not change before the answer. Its context manager needs no ``async``.
    """
