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
    """An object that cannot be pickled, because its connections and memory belong to one process."""

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
        """The arrays that you fill before :meth:`infer`: C-contiguous, writable, not cleared; or the tensors you gave.

        They have the shapes and dtypes that you gave to ``prepare``. Strings are arrays of objects; others are views of
        shared memory, unless the path is inline. Fill them by ``call.inputs["X"][...] = array``. On a GPU, an input is
        an array of the ``library`` that you gave to ``prepare``, else a :class:`DeviceArray`, from which a library
        makes its own array: ``torch.from_dlpack(call.inputs["X"])``. After :meth:`close`, arrays that you hold stay
        valid, but no request reads them. Asking for one then raises ClosedError, also in a forked child, whose memory
        is the parent's.
        """
        if self._core.is_forked:
            raise ForkedError("this call")
        return self._inputs

    @property
    def path(self) -> str:
        """``"direct"``, ``"triton-shm"`` or ``"inline"``: the path that the tensors take."""
        return self._call.path

    def infer(
        self, *_inputs: NoReturn, timeout_s: float | None = None, cuda_stream: Any = None, **_options: NoReturn
    ) -> ResultT:
        """Run the model on the contents of :attr:`inputs`. Each further call overwrites the last result's arrays.

        An output without room, such as one of unknown size, comes back through Triton. Before the next request, the
        call takes memory for it if the pool has enough free; the inputs stay where they are.

        Parameters
        ----------
        timeout_s : float, optional
            How long to wait for the answer, in seconds; by default the one given to ``prepare``.
        cuda_stream : object, optional
            As in :meth:`inputs_ready`. These streams wait for outputs that the model's GPU is still writing.

        Returns
        -------
        Result
            Its arrays are views of this call's memory. The next :meth:`infer` overwrites them, unless it takes other
            memory for them. An output that the model passes on from an input shares that input's memory, so filling the
            input again changes it. Copy the values that you want to keep, for example by :meth:`Result.copy`.

        Raises
        ------
        InferenceError, DeadlineExceededError, ServerUnavailableError, PeerError
            As in :meth:`ShmClient.infer`. Without an answer, the model may still execute the request, now or later.
        SlotInDoubtError
            The model may still be executing an earlier request of this call that got no answer.
        CallerError
            Another thread is running this call.
        """
        if _inputs or _options:
            raise TypeError(
                "infer() of a prepared call takes only timeout_s and cuda_stream; write call.inputs['INPUT0'][...] = "
                "array, and give options to prepare()"
            )
        return self._driver.run(self._infer(timeout_s, cuda_stream), self._core.tally)

    def inputs_ready(self, cuda_stream: Any) -> None:
        """Name the work on GPUs that the next request waits for, instead of all work of this process there.

        ``cuda_stream`` names the streams of your work that writes the inputs, or still reads earlier results. As in
        :meth:`ShmClient.infer`, it is a stream, an event recorded after that work, or a sequence of these.
        """
        if self._call.is_closed:
            raise ClosedError("this call")
        self._named = named(cuda_stream)

    def close(self) -> None:
        """Give the memory back as soon as no array needs it. Twice is fine."""
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
                "another thread or task is running this prepared call, which has memory for one request at a time; "
                "prepare one call for each thread or task"
            )
        try:
            if self._call.gpus is not None:
                self._call.gpus.named = self._named
            self._named = ()
            return (yield from infer_prepared(self._core, self._call, deadline))
        finally:
            self._in_use.release()


class PreparedCall(Prepared[Result]):
    """A call of a :class:`ShmClient` with its own memory. Only one thread at a time may call :meth:`infer`."""


class AsyncPreparedCall(Prepared[Coroutine[Any, Any, Result]]):
    """A call of an :class:`AsyncShmClient` with its own memory: a :class:`PreparedCall` whose ``infer`` you await.

    Do not change the inputs before the answer. Its context manager is a plain ``with`` block, without ``async``.
    """
