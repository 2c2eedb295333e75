"""ShmClient: inference whose tensors stay in shared memory."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import math
import threading
import time
from collections.abc import Callable, Generator, Mapping
from typing import TYPE_CHECKING, Any, Final

from ..errors import ClosedError
from ..memory.repeater import Repeater
from ..process import Origin, Unclosed, call_after_fork
from .calls import infer
from .core import Core
from .errors import ForkedError, out_of_time
from .explanation import Explanation
from .inputs.sources import Outputs
from .methods import ClientMethods
from .options import LibraryName, PathName, RequestOptions
from .prepared import CLOSE_OR_WITH, PreparedCall
from .result import Result
from .server_calls import start
from .steps import BlockingDriver, Steps, until_copied
from .streams import OpenStream
from .transports.transport import connect

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["ShmClient", "SubmittedCalls"]

_MOST_AT_ONCE: Final = 32
_ROUND_S: Final = 0.1

Submitted = concurrent.futures.Future[Result]


class SubmittedCalls:
    """The submitted calls of one client. Each waits for a free thread, at most until its deadline."""

    def __init__(self) -> None:
        self._threads = concurrent.futures.ThreadPoolExecutor(_MOST_AT_ONCE, "shm submit")
        self._lock = threading.Lock()
        self._under_way: set[Submitted] = set()
        self._with_threads: set[Submitted] = set()  # each until its callbacks have returned, which may take long
        self._waiting: dict[Submitted, float] = {}  # calls and their deadlines; the code that pops a call ends it
        self._watch: Repeater | None = None
        call_after_fork(self)

    def submit(self, call: Callable[[], Result], deadline: float) -> Submitted:
        """Queue a call for a thread, which must begin before the deadline; raises ClosedError after :meth:`close`."""
        future = Submitted()
        try:
            self._waiting[future] = deadline
            self._with_threads.add(future)
            self._under_way.add(future)
            future.add_done_callback(self._under_way.discard)
            try:
                self._threads.submit(self._make, call, future)
            except RuntimeError:
                raise ClosedError("this client") from None
        except BaseException:
            self._waiting.pop(future, None)
            self._with_threads.discard(future)
            self._under_way.discard(future)
            raise
        if len(self._with_threads) > _MOST_AT_ONCE:
            with self._lock:
                if self._watch is None:
                    self._watch = Repeater(self._end_the_late, _ROUND_S, "shm submit deadlines")
        return future

    def close(self) -> None:
        """Cancel the calls that have not begun, and accept no more. It does not wait. Twice is fine."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for future in list(self._waiting):
            if self._waiting.pop(future, None) is not None and future.cancel():
                future.set_running_or_notify_cancel()

    def after_fork(self) -> None:
        """Fail the pending calls in a forked child, which has no threads to finish them."""
        for future in self._under_way:
            concurrent.futures.Future.__init__(future)  # a new lock: a thread of the parent may have held the old one
            future.set_exception(ForkedError("this call"))

    def _make(self, call: Callable[[], Result], future: Submitted) -> None:
        try:
            self._answer(call, future)
        finally:
            self._with_threads.discard(future)

    def _answer(self, call: Callable[[], Result], future: Submitted) -> None:
        if self._waiting.pop(future, None) is None or not future.set_running_or_notify_cancel():
            return
        try:
            result = call()
        except BaseException as error:
            future.set_exception(error)
            del call, future  # else a kept error would keep them, too
        else:
            future.set_result(result)

    def _end_the_late(self) -> float:
        now = time.monotonic()
        for future, deadline in list(self._waiting.items()):
            if now > deadline and self._waiting.pop(future, None) is not None and future.set_running_or_notify_cancel():
                future.set_exception(out_of_time("it waited for a thread"))
        with self._lock:
            if not self._waiting and self._watch is not None:
                self._watch.stop_some_time()
                self._watch = None
        return _ROUND_S


class ShmClient(
    ClientMethods[Result, PreparedCall, Generator[Result, None, None], Explanation, bool, dict[str, Any], None]
):
    """A client of one server. It is a context manager, and several threads may use it at once.

    Creating a client removes the regions that killed clients and models of the same user left in shared memory.

    Parameters
    ----------
    url : str or Connectable
        ``HOST:PORT`` or ``grpc://HOST:PORT`` for gRPC, ``http://HOST:PORT`` for HTTP; ``grpcs://`` or
        ``https://`` with TLS. Or an object that connects clients itself, such as a :class:`.ModelHarness`.
    timeout_s : float
        The default time limit of a call, in seconds. It covers the whole call: questions about the model, the wait
        for memory, the copy of the inputs, and all requests. Some steps cannot be interrupted, so a call may take
        longer: a copy that has begun, the next 128 MiB of new memory, and the look-up of the server's host name.
    path : str
        ``"auto"`` takes ``"direct"`` if the model declares it and the memory can be shared, else ``"triton-shm"``,
        else ``"inline"``. If you name one of these three, a call takes that path or raises an error.
    pool : PoolOptions, optional
        How much shared memory to use.
    tls : Tls, optional
        Certificates for ``grpcs://`` and ``https://``.
    cuda : CudaAccess, optional
        Access to CUDA, for tensors on GPUs. By default NVIDIA's driver bindings, loaded when a call first needs them.
    wait_ready_s : float, optional
        How long to wait, in seconds, for a server that is starting or loading its models; by default not at all.
    inline_bytes : int, optional
        With ``path="auto"``, a call goes inline if its inputs and outputs take at most this many bytes together, each
        rounded up to 256: this is faster for small tensors. Their sizes must be known, and the model must have no
        strings. 0 turns this off. The defaults, 16,384 over gRPC and 0 over HTTP, were measured.

    Raises
    ------
    ServerUnavailableError
        No server answers at this URL, or it was not ready in time.
    """

    _driver: BlockingDriver
    _kind_of_prepared = PreparedCall
    _most_bytes = math.inf

    def submit(
        self,
        model: str,
        inputs: Mapping[str, Any],
        *,
        outputs: Outputs = None,
        timeout_s: float | None = None,
        path: PathName | None = None,
        cuda_stream: Any = None,
        library: LibraryName | None = None,
        **options: Unpack[RequestOptions],
    ) -> concurrent.futures.Future[Result]:
        """Call :meth:`infer` without waiting for the answer. All inputs have been copied when this returns.

        It waits for memory, so you cannot submit faster than the model answers for long. ``timeout_s`` runs from this
        call to the answer. ``split`` is not available.

        It raises the errors of :meth:`infer` that are found before anything is sent. The future's ``result()`` raises
        those of the server, which you do not see until you call it. The result keeps its shared memory as long as the
        future lives.
        """
        core = self._open_core()
        settings = self._settings.of_call("submit", model, path, timeout_s, options, cuda_stream, library)
        call = infer(core, settings, inputs, outputs, core.copied_from_gpus)
        try:
            self._run(until_copied(call), core.tally)
            future = self._submitted.submit(functools.partial(self._run, call, core.tally), settings.deadline)
        except BaseException:
            call.close()
            raise
        future.add_done_callback(lambda _: _give_up(call))
        return future

    def close(self) -> None:
        """Close the connection and remove the shared memory. Arrays of results stay valid. Twice is fine.

        It waits up to a second for streams that have not ended; their users get a ClosedError.

        It unregisters the memory of the path triton-shm. If you do not close a client, the server keeps that memory
        until it stops. When such a client is garbage-collected, a ResourceWarning names the line that created it. A
        finalizer does not unregister the memory, because asking the server may take long.
        """
        core, self._core = self._core, None
        if core is not None and not core.is_forked:
            self._submitted.close()
            self._driver.run(core.close())
            self._driver.close()
        self._memory.end()

    def __enter__(self) -> ShmClient:
        self._open_core()
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _begin(self) -> None:
        core, self._submitted = self._open_core(), SubmittedCalls()
        self._driver = BlockingDriver(connect(self._settings.url, self._settings.tls))
        self._run = self._driver.run
        core.connect(self._driver.transport, self._settings.inline_bytes)
        self._unclosed = Unclosed(Origin.here("the ShmClient made"), CLOSE_OR_WITH, core.rest_at_server)
        try:
            self._run(start(core, self._settings))
        except BaseException:
            self.close()
            raise

    def _responses(self, core: Core, opening: Steps[OpenStream]) -> Generator[Result, None, None]:
        driver = self._driver
        with (
            driver.run(opening, core.tally) as stream,
            contextlib.closing(driver.transport.stream(stream.call.message(), stream.timeout_s)) as answers,
        ):
            for answer in answers:
                if results := driver.run(stream.results(answer)):
                    yield results.pop()  # keep no reference: the frame is free when the user drops the result
                if core.is_forked:
                    raise ForkedError("this stream")
                del answer  # on Python 3.13, an interrupt where a loop ends with `if` would skip `finally`


def _give_up(call: Steps[Result]) -> None:
    """Close a call that no thread will run, because its future was cancelled or its deadline has passed."""
    with contextlib.suppress(ValueError):  # in a forked child, if a thread of the parent was running it
        call.close()
