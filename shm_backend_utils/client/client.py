"""ShmClient: inference whose tensors stay in shared memory."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import time
from collections.abc import Generator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from ..errors import ClosedError
from ..memory.cuda.access import CudaAccess
from ..memory.pool.options import PoolOptions
from ..origin import Origin
from ..unclosed import Unclosed
from .calls import infer, prepare
from .client_memory import ClientMemory
from .core import Core
from .errors import ForkedError
from .explanation import Explanation
from .inputs.descriptions import InputDescription, Outputs
from .options import LibraryName, PathName, RequestOptions, Tls, check_keywords
from .prepared import CLOSE_OR_WITH, PreparedCall
from .result import Result
from .server_calls import start
from .server_methods import P, ServerCall, ServerMethods, T
from .settings import CallSettings, ClientSettings
from .split import infer_split
from .stats import ClientStats
from .steps import BlockingDriver, Steps, until_copied
from .streams import holding_told, on_their_gpus, open_stream, responses_of
from .submitted import SubmittedCalls
from .transports.connect import Connectable, connect

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["ShmClient"]


class ShmClient(ServerMethods):
    """A client of one server. A context manager. May be used from several threads at once.

    Making one removes what this user's clients and models have left in shared memory when they were killed.

    Parameters
    ----------
    url : str or Connectable
        ``HOST:PORT`` or ``grpc://HOST:PORT`` for gRPC, ``http://HOST:PORT`` for HTTP; ``grpcs://`` or
        ``https://`` by TLS. Or what connects clients itself, such as a :class:`.ModelHarness`.
    timeout_s : float
        How long a call may take, in seconds, where it does not say otherwise. It bounds the whole call: what is asked
        about the model, the wait for memory, the copy of the inputs, and all requests together. The slack is what
        cannot be broken off: a copy that has begun, the next 128 MiB of new memory, and the look-up of the server's
        host name.
    path : str
        ``"auto"``: ``"direct"`` where the model declares it and the memory can be shared, else ``"triton-shm"``, else
        ``"inline"``. One of these by name: that, or an error.
    pool : PoolOptions, optional
        How much shared memory to use.
    tls : Tls, optional
        Certificates.
    cuda : CudaAccess, optional
        For tensors on GPUs; by default NVIDIA's bindings of the driver, loaded when a call has one first.
    wait_ready_s : float, optional
        How long to wait for a server that is not up yet, or loads its models, in seconds; by default not at all.
    inline_bytes : int, optional
        Small tensors are faster in band: calls of ``path="auto"`` whose inputs and outputs take up to so many bytes
        together, each rounded up to 256, go so, if all their sizes are known and the model has no strings. 0 for none;
        by default what was measured, 16,384 over gRPC and 0 over HTTP.

    Raises
    ------
    ServerUnavailableError
        No server answers there; or it was not ready in time.
    """

    _core: Core | None = None

    def __init__(
        self,
        url: str | Connectable,
        *,
        timeout_s: float = 60.0,
        path: PathName = "auto",
        pool: PoolOptions | None = None,
        tls: Tls | None = None,
        cuda: CudaAccess | None = None,
        wait_ready_s: float | None = None,
        inline_bytes: int | None = None,
        **unknown: NoReturn,
    ) -> None:
        check_keywords(type(self).__name__, unknown)
        self._settings = ClientSettings(url, timeout_s, path, tls, wait_ready_s, inline_bytes)
        self._memory = ClientMemory(pool or PoolOptions(), cuda or CudaAccess())
        self._memory.end_with(self)
        self._submitted = SubmittedCalls()
        transport = connect(url, tls)
        self._driver = BlockingDriver(transport)
        self._core = Core(transport.codec, transport.host, self._memory, self._settings.inline_bytes)
        self._unclosed = Unclosed(Origin.here("the ShmClient made"), CLOSE_OR_WITH, self._core.rest_at_server)
        try:
            self._driver.run(start(self._core, self._settings))
        except BaseException:
            self.close()
            raise

    def infer(
        self,
        model: str,
        inputs: Mapping[str, Any],
        *,
        outputs: Outputs = None,
        timeout_s: float | None = None,
        path: PathName | None = None,
        split: bool = False,
        stream: Any = None,
        library: LibraryName | None = None,
        **options: Unpack[RequestOptions],
    ) -> Result:
        """Run a model. On the direct path its inputs are copied once, into shared memory, and its outputs not at all.

        Parameters
        ----------
        model : str
            Its name.
        inputs : mapping
            Name to a NumPy array in any memory order; to anything with ``__dlpack__``, ``__array_interface__`` or
            ``__array__``, on the host; to a list of these; to a tensor on a GPU, with ``__dlpack__`` or
            ``__cuda_array_interface__``; or to Python numbers and strings. Dtypes of arrays must be the model's, and no
            element may be masked. Arrays of a list that have one dimension less than the input are its rows. Where the
            model takes batches, those with as many dimensions as the input are parts of one batch. On the direct path a
            tensor on a GPU is used where it is, if CUDA IPC can share it, and from ``PoolOptions.lend_bytes`` on;
            models can see the whole allocation that it is part of.
        outputs : iterable of str or mapping, optional
            The outputs wanted, one or more; all if not given. A mapping also says how much room each needs, as bytes,
            as ``(shape, dtype)``, or as None. Where neither this nor the configuration tells, the size is learned from
            the first call, whose output comes back through Triton. ``"cuda:0"``, or ``(shape, dtype, "cuda:0")``, has
            the output on that GPU; all others come to the host, also if the inputs are on a GPU.
        timeout_s : float, optional
            How long the whole call may take, in seconds, with the slack that :class:`ShmClient` names; by default what
            the client says.
        path : str, optional
            As for the client.
        split : bool
            Whether a batch may be larger than the model takes at once: it is sent as several requests, side by side.
        stream : object, optional
            What the work of yours is on that writes inputs on GPUs, or still reads arrays of earlier results there: a
            stream of torch or CuPy, anything with ``__cuda_stream__``, a ``CUstream`` as a number; an event; or a
            sequence of these. The call waits for that alone, and outputs that the model's GPU is still writing are
            waited for on these streams. Not named, all that the call's GPUs do for this process is waited for.
        library : str, optional
            Whose arrays outputs on GPUs are: ``"torch"``, ``"cupy"``, ``"jax"`` or ``"numba"``; by default the one that
            inputs on GPUs are of, else :class:`DeviceArray`, which all of them take.
        **options
            See :class:`RequestOptions`.

        Returns
        -------
        Result
            Name to array, of the shapes and dtypes that the model gave. Views of this client's shared memory, where the
            outputs lie there; it is not used for another call before the result and its arrays are gone.

        Raises
        ------
        CallerError, TypeError
            An argument is none that can be sent.
        TensorError
            The model does not take these tensors.
        PathUnavailableError
            The path that was asked for is closed; the message says why.
        PoolExhaustedError, BudgetError, MachineError
            There is not enough shared memory: now, ever, or on this machine.
        InferenceError
            The server refused or failed the request.
        DeadlineExceededError, ServerUnavailableError
            It did not answer.
        """
        core = self._core
        if core is None or core.is_forked:
            core = self._open_core()  # which raises
        settings = self._settings.of_call("infer", model, path, timeout_s, options, stream, library)
        run = self._driver.run
        try:
            if split:
                return run(infer_split(core, settings, inputs, outputs))
            return run(infer(core, settings, inputs, outputs))
        except BaseException:
            core.tally.failed()
            raise

    def submit(
        self,
        model: str,
        inputs: Mapping[str, Any],
        *,
        outputs: Outputs = None,
        timeout_s: float | None = None,
        path: PathName | None = None,
        stream: Any = None,
        library: LibraryName | None = None,
        **options: Unpack[RequestOptions],
    ) -> concurrent.futures.Future[Result]:
        """As :meth:`infer`, without waiting for the answer. All inputs have been copied when this returns.

        It waits for memory: a caller that submits faster than the model answers is slowed down to its pace.

        Parameters
        ----------
        model, inputs, outputs, timeout_s, path, stream, library, **options
            As of :meth:`infer`; the time runs from here to the answer. There is no ``split``.

        Returns
        -------
        concurrent.futures.Future of Result
            What the server refuses or fails, and what it does not answer, its ``result()`` raises, as :meth:`infer`
            does. The result keeps its shared memory as long as the future lives; an error that nobody asks for is not
            seen.

        Raises
        ------
        CallerError, TypeError, TensorError, PathUnavailableError, PoolExhaustedError, BudgetError, MachineError
            As of :meth:`infer`: what is known before anything is sent.
        """
        core = self._open_core()
        settings = self._settings.of_call("submit", model, path, timeout_s, options, stream, library)
        call = infer(core, settings, inputs, outputs, core.copied_from_gpus)
        try:
            with core.tally.failures():
                self._driver.run(until_copied(call))
            future = self._submitted.submit(functools.partial(_finish, self._driver, core, call), settings.deadline)
        except BaseException:
            call.close()
            raise
        future.add_done_callback(lambda _: _give_up(call))
        return future

    def prepare(
        self,
        model: str,
        inputs: Mapping[str, InputDescription],
        *,
        outputs: Outputs = None,
        timeout_s: float | None = None,
        path: PathName | None = None,
        library: LibraryName | None = None,
        **options: Unpack[RequestOptions],
    ) -> PreparedCall:
        """Return a call whose inputs are to be filled in place: no copy at all on the direct path.

        Parameters
        ----------
        model : str
            Its name.
        inputs : mapping
            Name to ``(shape, dtype)``, or ``(shape, dtype, "cuda:0")`` for memory of a GPU. The shape has the batch
            dimension, where the model has one, and whole numbers alone. Strings are of dtype ``"S20"``: room for 20
            bytes each, on average. Or to a tensor on a GPU, which then is the input's memory as long as the call lives:
            C-contiguous, and of a kind that CUDA IPC can share, if the path is direct. Models see the whole allocation
            that it is part of.
        outputs : iterable of str or mapping, optional
            As of :meth:`infer`.
        timeout_s : float, optional
            How long this may take, and then each :meth:`PreparedCall.infer`, in seconds; by default what the client
            says.
        path : str, optional
            As for the client.
        library : str, optional
            Whose arrays inputs on GPUs that are to be filled are, and outputs there; as of :meth:`infer`.
        **options
            See :class:`RequestOptions`; of every request.

        Returns
        -------
        PreparedCall
            With memory of its own until it is closed, and more of it once outputs of unknown size have found no room.
            Its arrays are not cleared.

        Raises
        ------
        CallerError, TypeError
            An argument is none that can be sent.
        TensorError
            The model does not take such tensors.
        PathUnavailableError, PoolExhaustedError, BudgetError, MachineError
            As of :meth:`infer`.
        """
        core = self._open_core()
        settings = self._settings.of_call("prepare", model, path, timeout_s, options, library=library)
        call = self._driver.run(prepare(core, settings, inputs, outputs))
        return PreparedCall(core, call, self._settings.patience_s(timeout_s), self._driver)

    def stream(
        self,
        model: str,
        inputs: Mapping[str, Any],
        *,
        outputs: Outputs = None,
        timeout_s: float | None = None,
        path: PathName | None = None,
        frames: int | None = None,
        stream: Any = None,
        library: LibraryName | None = None,
        **options: Unpack[RequestOptions],
    ) -> Generator[Result, None, None]:
        """Return the responses of a decoupled model as they come. Over gRPC, which alone has streams.

        On the direct path each response lies in one of ``frames`` places of a ring. The model waits, for some time,
        where its next place is still in use: until the result there is released and its arrays are gone. So keep fewer
        results than there are frames, or copies of them.

        A response that finds too little room comes back through Triton, and the client's next stream has room for it.

        Parameters
        ----------
        model, inputs, outputs, path, stream, library, **options
            As of :meth:`infer`, though tensors on GPUs go over the host. An output's room is that of one response.
        timeout_s : float, optional
            The longest wait for each response, in seconds; by default what the client says. The stream as a whole has
            no bound.
        frames : int, optional
            How many responses of a decoupled model may lie in shared memory at once, 1 to 64; by default 8, or 4
            where these take more than ``PoolOptions(stream_guess_bytes=...)``.

        Returns
        -------
        iterator of Result
            Nothing is sent before it is asked for the first. Each result's arrays are valid as long as they live. Who
            stops early ends the stream by ``close()`` of the iterator, or by letting go of it.

        Raises
        ------
        CallerError, TypeError
            An argument is none that can be sent. All other errors of :meth:`infer` come from the iterator, and these:
        CallerError
            The client speaks HTTP.
        DeadlineExceededError
            No response came in time; maybe because the model waits for results to be released.
        """
        core = self._open_core()
        settings = self._settings.of_call("stream", model, path, timeout_s, options, stream, library)
        return self._responses(core, settings, inputs, outputs, frames, self._settings.patience_s(timeout_s))

    def explain(self, model: str, *, model_version: str = "") -> Explanation:
        """Check anew which path calls of a model take, and why.

        Parameters
        ----------
        model : str
            Its name.
        model_version : str, optional
            By default the server chooses.

        Returns
        -------
        Explanation
            Printed, it is a table: a line for each condition, with what to do.

        Raises
        ------
        InferenceError
            The server has no such model.
        DeadlineExceededError, ServerUnavailableError
            It did not answer.
        """
        return self._driver.run(self._open_core().explain(model, model_version, self._settings.timeout_s))

    def stats(self) -> ClientStats:
        """Return what this client has done so far.

        Returns
        -------
        ClientStats
            Figures of this moment; they do not change afterwards.

        Raises
        ------
        ClosedError
            The client was closed.
        """
        return self._open_core().stats()

    def close(self) -> None:
        """Close the connection and remove the shared memory. Arrays of results stay valid. Twice is fine.

        It waits up to a second for streams that have not ended, whose users get a ClosedError.

        What the path triton-shm has registered is unregistered here and nowhere else: the server keeps the memory of a
        client that was not closed for as long as it runs. A ResourceWarning names the line that made such a client,
        when it is garbage: to ask the server then might take long, which a finalizer must not.
        """
        core, self._core = self._core, None
        if core is not None and not core.is_forked:
            self._submitted.close()
            self._driver.run(core.close())
            self._driver.close()
        self._memory.end()

    def __repr__(self) -> str:
        state = "closed" if self._core is None else self._core.state
        return f"<{type(self).__name__} {vars(self).get('_settings', 'of no server')} {state}>"

    def __enter__(self) -> ShmClient:
        self._open_core()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ask(self, timeout_s: float | None, call: ServerCall[P, T], *named: P.args, **more: P.kwargs) -> T:
        core, deadline = self._open_core(), time.monotonic() + self._settings.patience_s(timeout_s)
        return self._driver.run(call(core.codec, deadline, *named, **more))

    def _responses(
        self,
        core: Core,
        settings: CallSettings,
        inputs: Mapping[str, Any],
        outputs: Outputs,
        frames: int | None,
        patience_s: float,
    ) -> Generator[Result, None, None]:
        if core.is_forked:
            raise ForkedError("this stream")
        avoided = 0
        with core.tally.failures():
            stream = self._driver.run(open_stream(core, settings, inputs, outputs, frames))
            with contextlib.closing(stream.call), holding_told(stream):
                answers = self._driver.transport.stream(stream.call.message(), patience_s)
                with contextlib.closing(answers):
                    for answer in answers:
                        results = responses_of(core, stream, answer)
                        if stream.output_devices:
                            self._driver.run(on_their_gpus(core, stream, results))
                        avoided += sum(result.bytes_avoided for result in results)
                        while results:
                            yield results.pop()  # held by nobody here: its frame is free when the user lets go of it
                        if core.is_forked:
                            raise ForkedError("this stream")
        core.tally.succeeded(stream.call.path, avoided)

    def _open_core(self) -> Core:
        if self._core is None:
            raise ClosedError("this client")
        if self._core.is_forked:
            raise ForkedError("this client")
        return self._core


def _give_up(call: Steps[Result]) -> None:
    """End a call that no thread will make, as its future was cancelled, or is late."""
    with contextlib.suppress(ValueError):  # a thread makes it: this is a forked child
        call.close()


def _finish(driver: BlockingDriver, core: Core, call: Steps[Result]) -> Result:
    with core.tally.failures():
        return driver.run(call)
