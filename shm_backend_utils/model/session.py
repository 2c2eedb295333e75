"""ShmSession: ``model.py`` makes one in ``initialize``, and serves its requests with it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, Final

from ..errors import ClosedError, MachineError, ModelError, ShmError
from ..gpu.instance import InstanceGpus
from ..gpu.memory.access import CudaAccess
from ..memory import reaper
from ..model_spec import ModelSpec
from ..process import Origin, Unclosed
from .call import Call
from .config import Config, load_warnings
from .context import Context
from .debug import DEBUGGED, PLAIN
from .metrics import Metrics
from .modes.batch import BatchCall, Buffers, batches_of
from .modes.stream import StreamCall, run_stream

__all__ = ["ShmSession", "check_has_run", "complete", "complete_early", "serve_one"]

_DEFAULTS: Final = Config()
_responses_of: Final = attrgetter("response")


class ShmSession:
    """Serves the requests of one model instance. Make it in ``initialize``, close it in ``finalize``.

    When it is made, it removes shared memory that killed models and clients of this user left behind.

    Parameters
    ----------
    spec : ModelSpec
        The model's configuration.
    config : Config, optional
        The parameters of the configuration.
    cuda : CudaAccess, optional
        By default NVIDIA's driver, loaded when a request first uses a GPU.
    device : int, optional
        The instance's GPU. None for KIND_CPU: then tensors copied to a GPU go to GPU 0.
    version : str
        The model's version, for its metrics.

    Raises
    ------
    ModelError
        The configuration declares the direct path, but cannot serve it.
    """

    def __init__(
        self,
        spec: ModelSpec,
        config: Config = _DEFAULTS,
        cuda: CudaAccess | None = None,
        device: int | None = None,
        version: str = "",
    ) -> None:
        if type(spec) is not ModelSpec:
            raise ModelError("ShmSession takes a ModelSpec; in initialize, write ShmSession.from_args(args)")
        reaper.reap()
        context = Context(spec, config, cuda or CudaAccess(), device or 0)
        self._context: Context | None = context
        self._name = spec.name
        self._backend = context.backend
        start, mapped = Metrics.start_or_warn, context.resolver.registry.mapped
        self._metrics = start(self._backend, spec.name, version, mapped) if config.metrics else None
        call, measured_call, self._new_stream_call, self._new_gathering = DEBUGGED if config.debug else PLAIN
        self._new_call: Callable[..., Call] = call if self._metrics is None else partial(measured_call, self._metrics)
        self._complete = complete_early if config.gpu_events else complete
        self._is_on_gpu = device is not None
        self._buffers = Buffers(context.pinning)
        self._unclosed = Unclosed(Origin.here("the ShmSession made"), "call close() in finalize()")

    @classmethod
    def from_args(cls, args: Mapping[str, str], cuda: CudaAccess | None = None) -> ShmSession:
        """Make a session in ``initialize``. Close it in ``finalize``. It logs advice on the model.

        Parameters
        ----------
        args : mapping of str to str
            The ``args`` that ``initialize`` gets.
        cuda : CudaAccess, optional
            As for the class.

        Raises
        ------
        ModelError
            The configuration contradicts itself, or has an unknown parameter; the message tells you how to correct it.
        """
        if not isinstance(args, Mapping) or "model_config" not in args:
            raise ModelError("from_args takes the args of initialize unchanged: write ShmSession.from_args(args)")
        config = json.loads(args["model_config"])
        device = int(args["model_instance_device_id"]) if args.get("model_instance_kind") == "GPU" else None
        version = args.get("model_version", "")
        spec = ModelSpec.from_config(config)
        session = cls(spec, Config.from_config(config), cuda, device, version)
        for line in load_warnings(spec, config, stub_reads_numpy=session._backend.reads_numpy):
            session._backend.log_warning(line)
        return session

    def serve(self, requests: Iterable[Any], infer: Callable[[Call], object]) -> list[Any]:
        """Run ``infer`` on every request, one after another. Call it in ``execute``.

        If a request fails, only that request fails: its response carries the error.

        Parameters
        ----------
        requests : iterable of InferenceRequest
            The requests that ``execute`` gets.
        infer : callable
            Takes a :class:`Call`, reads its inputs and makes its outputs. An exception becomes the request's error; the
            return value is ignored. The call and its views are valid until ``infer`` returns: afterwards the memory may
            serve another request, so copy values that you want to keep.

        Returns
        -------
        list of InferenceResponse
            One for each request, in order.
        """
        context = self._context
        if context is None:
            return self._closed_responses(requests)
        new_call = self._new_call
        calls: list[Call] = []
        waiting: list[Call] = []
        for request in requests:
            call = new_call(context, request)
            calls.append(call)
            try:
                call.begin()
                returned = infer(call)
                if returned is not None:
                    check_has_run(returned)
                    del returned  # the value may hold the request's memory
                call.commit()
                if call.devices is None:
                    call.end()
                else:
                    waiting.append(call)
            except BaseException as error:  # whatever it is, only this request may fail
                self._log(error)
                call.fail(error)
        if waiting:
            self._complete(waiting, context.arrays)
        return list(map(_responses_of, calls))

    async def serve_async(self, requests: Iterable[Any], infer: Callable[[Call], Awaitable[None]]) -> list[Any]:
        """Do the same as :meth:`serve` concurrently on the event loop. For an ``execute`` that is a coroutine function.

        ``infer`` is a coroutine function. When it returns, the call's memory is the client's again, so tasks that it
        started must have ended.
        """
        context = self._context
        if context is None:
            return self._closed_responses(requests)
        if self._is_on_gpu:  # the event loop's thread is not the one that called initialize()
            self._make_gpu_current(context)
        calls = [self._new_call(context, request) for request in requests]
        try:
            await asyncio.gather(*[serve_one(call, infer, self._fail) for call in calls])
        except asyncio.CancelledError:  # execute was cancelled; all calls are over, but some may wait for a GPU
            self._responses(calls, context.arrays)
            raise
        return self._responses(calls, context.arrays)

    def open(self, request: Any) -> Call:
        """Return one request of ``execute`` as a context manager, if you want to write the loop yourself.

        Entering it raises a :class:`ShmError` if the request cannot be served; its class tells whose fault that is.
        After its exit, or a failed entry, let ``execute`` return ``call.response``.
        """
        return self._new_call(self._open_context(), request)

    def serve_batch(self, requests: Iterable[Any], infer: Callable[[BatchCall], object]) -> list[Any]:
        """Do the same as :meth:`serve`, but run ``infer`` once for all requests: it takes a :class:`BatchCall`.

        An exception becomes the error of all requests of the batch. A request that is refused, or has unreadable
        strings, is left out of the batch and gets its own error. If inputs differ in more than their rows, the requests
        cannot be one batch: then ``infer`` runs once for each kind.

        Raises
        ------
        ModelError
            The model's configuration has ``max_batch_size: 0``, so its requests have no rows.
        """
        context = self._context
        if context is None:
            return self._closed_responses(requests)
        if context.spec.max_batch_size == 0:
            raise ModelError(f"model {context.spec.name!r} has max_batch_size 0, so it has no batches; use serve")
        calls = [self._new_call(context, request) for request in requests]
        for number, batch in enumerate(batches_of(calls, self._fail)):
            gathering = self._new_gathering(self._buffers, context.arrays, number)
            self._infer_batch(BatchCall(batch, gathering), infer)
        return self._responses(calls, context.arrays)

    def serve_streams(self, requests: Sequence[Any], answer: Callable[[StreamCall], Iterable[object] | None]) -> None:
        """Run ``answer`` on every request of a decoupled model. Call it in ``execute``, which returns None then.

        It refuses requests of a model that is not decoupled; use :meth:`serve` for them. Several requests run
        concurrently, each in its own thread, where the instance's GPU, if any, is the current device.

        ``answer`` takes a :class:`StreamCall`. If it is a generator, each ``yield`` sends the written outputs. It is a
        ModelError if it yields a value, or writes an output after the last ``yield``. If the client cancels the stream,
        the generator is closed.
        """
        context = self._context
        if context is None:
            for request in requests:
                error = self._backend.error_response(ClosedError("this session"))
                self._backend.send_last(request.get_response_sender(), error)
            return
        if len(requests) == 1:
            self._serve_stream(requests[0], answer)
            return
        with concurrent.futures.ThreadPoolExecutor(
            max(len(requests), 1), "shm stream", self._make_gpu_current, (context,)
        ) as threads:
            for request in requests:
                threads.submit(self._serve_stream, request, answer)

    def stream(self, request: Any) -> StreamCall:
        """Return one request of a decoupled model as a context manager; its exit ends the stream.

        Entering it raises a :class:`ShmError` if the request cannot be served; the client has got the error then. ::

            for request in requests:
                with session.stream(request) as call:
                    for tile in tiles_of(call.input("IMAGE").numpy()):
                        call.put("TILE", tile)
                        call.send()
        """
        return self._new_stream_call(self._open_context(), request)

    def close(self) -> None:
        """Unmap every region, except for regions under live arrays. Closing twice is fine.

        Later requests get a ClosedError, and :meth:`open` and :meth:`stream` raise it.
        """
        self._unclosed.close()
        context, self._context = self._context, None
        if context is not None:
            if self._metrics is not None:
                self._metrics.close()
            self._buffers.close()
            context.close()

    def __repr__(self) -> str:
        state = "closed" if vars(self).get("_context") is None else "open"
        return f"<{type(self).__name__} {vars(self).get('_name', '')!r} {state}>"

    def _infer_batch(self, batch: BatchCall, infer: Callable[[BatchCall], object]) -> None:
        """Run ``infer`` on a batch, and end the calls that need not wait for a GPU."""
        try:
            returned = infer(batch)
            if returned is not None:
                check_has_run(returned)
                del returned  # the value may hold the requests' memory
            batch.scatter()
        except BaseException as error:
            self._log(error)
            for call in batch.calls:
                call.fail(error)
            return
        for call in batch.calls:
            try:
                call.commit()
                if call.devices is None:
                    call.end()
            except BaseException as error:
                self._fail(call, error)

    def _responses(self, calls: list[Call], arrays: InstanceGpus) -> list[Any]:
        """Return the responses of calls, after GPUs have finished the work of committed calls that are still open."""
        waiting = [call for call in calls if call.is_open]
        if waiting:
            self._complete(waiting, arrays)
        return list(map(_responses_of, calls))

    def _make_gpu_current(self, context: Context) -> None:
        """Make the instance's GPU, if it has one, current in the calling thread."""
        if self._is_on_gpu:
            try:
                context.arrays.make_current()
            except MachineError:  # without cuda-bindings, only model.py itself can use the GPU
                self._is_on_gpu = False

    def _open_context(self) -> Context:
        if self._context is None:
            raise ClosedError("this session")
        return self._context

    def _closed_responses(self, requests: Iterable[Any]) -> list[Any]:
        return [self._backend.error_response(ClosedError("this session")) for _ in requests]

    def _serve_stream(self, request: Any, answer: Callable[[StreamCall], Iterable[object] | None]) -> None:
        call = self.stream(request)
        try:
            run_stream(call, answer)
        except BaseException as error:  # the client has got the error; the next request must still be served
            self._log(error)
            if self._metrics is not None:
                self._metrics.refused(error)
        else:
            if self._metrics is not None:
                self._metrics.answered(call.path, 0, 0)

    def _fail(self, call: Call, error: BaseException) -> None:
        self._log(error)
        call.fail(error)

    def _log(self, error: BaseException) -> None:
        """Write an error and its traceback to the server's log if ``model.py`` has caused the error."""
        if isinstance(error, ModelError) or not isinstance(error, ShmError):
            with contextlib.suppress(Exception):  # the request needs its answer, even if the log fails
                self._backend.log_error("".join(traceback.format_exception(error)))


def complete(calls: Sequence[Call], arrays: InstanceGpus) -> None:
    """Wait for GPUs and end committed calls; if the wait fails, all fail, as CUDA does not show whose work failed."""
    try:
        arrays.wait([call.devices for call in calls if call.devices is not None])
    except BaseException as error:  # whatever it is, every call needs its response
        for call in calls:
            call.fail(error)
        return
    for call in calls:
        if call.devices is not None:
            call.devices.release()
        call.end()


def complete_early(calls: Sequence[Call], arrays: InstanceGpus) -> None:
    """End calls as :func:`complete` does, but wait for no GPU if the client can wait for it."""
    now: list[Call] = []
    for call in calls:
        try:
            if not call.end_early():
                now.append(call)
        except BaseException as error:  # whatever it is, the call needs its response
            call.fail(error)
    if now:
        complete(now, arrays)


async def serve_one(
    call: Call, infer: Callable[[Call], Awaitable[None]], fail: Callable[[Call, BaseException], None]
) -> None:
    """Begin a call, await ``infer`` on it, and end it unless a GPU still works for it; ``fail`` takes its error."""
    try:
        call.begin()
        await infer(call)
        call.commit()
        if call.devices is None:
            call.end()
    except BaseException as error:
        fail(call, error)


def check_has_run(returned: object) -> None:
    """Raise ModelError for a generator or a coroutine: the function that returned it has not begun to run."""
    if isinstance(returned, Generator):
        raise ModelError("the function yields, so its body did not run; pass generator functions to serve_streams")
    if isinstance(returned, Coroutine):
        returned.close()
        raise ModelError("the function is async, so its body did not run; pass async functions to serve_async")
