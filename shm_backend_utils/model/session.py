"""ShmSession: what ``model.py`` makes in ``initialize`` and serves its requests with."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import traceback
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from ..errors import ClosedError, ModelError, ShmError
from ..memory.cuda.events import EventRecorder
from ..memory.cuda.memory import CudaAccess
from ..model_spec import ModelSpec
from .batch import BatchCall
from .call import Call
from .completion import Completion
from .device_arrays import DeviceArrays
from .forward import Forwarder
from .gathering import Buffers, Gathering
from .instance import Instance
from .measured_call import MeasuredCall
from .metrics import Metrics
from .pinning import Pinning
from .places import DIRECT
from .plans import Plans
from .settings import Settings
from .stream import StreamCall
from .triton import TritonBackend

__all__ = ["ShmSession"]


class ShmSession:
    """Serves the requests of one model instance. Make it in ``initialize``, close it in ``finalize``.

    Parameters
    ----------
    spec : ModelSpec
        The model's configuration.
    settings : Settings
        What the configuration says of regions.
    cuda : CudaAccess, optional
        By default CuPy's, loaded when a request uses a GPU first.
    device : int
        The instance's GPU.
    version : str
        The model's, for its metrics.

    Raises
    ------
    ModelError
        The configuration declares the direct path, but contradicts it.
    """

    def __init__(
        self, spec: ModelSpec, settings: Settings, cuda: CudaAccess | None = None, device: int = 0, version: str = ""
    ) -> None:
        obstacle = spec.obstacle_to_direct()
        if obstacle is not None and spec.paths is not None and DIRECT in spec.paths:
            raise ModelError(obstacle)
        backend = TritonBackend()
        cuda = cuda or CudaAccess()
        arrays = DeviceArrays(cuda, device)
        pinning = Pinning(cuda, backend.log_warning) if settings.pin_host_memory else None
        forwarder = Forwarder(spec.name, backend, arrays, settings.server_url)
        plans = Plans(spec, settings, cuda, pinning)
        self._instance: Instance | None = Instance(spec, backend, plans, arrays, forwarder)
        start = Metrics.start_or_warn
        self._metrics = start(backend, spec.name, version, plans.mapped) if settings.metrics else None
        self._new_call: Callable[..., Call] = Call if self._metrics is None else partial(MeasuredCall, self._metrics)
        self._backend = backend
        self._buffers = Buffers(pinning)
        self._arrays = arrays
        self._cuda = cuda
        self._settings = settings
        self._events: EventRecorder | None = None

    @classmethod
    def from_args(cls, args: Mapping[str, str], cuda: CudaAccess | None = None) -> ShmSession:
        """Make the session from what Triton passes to ``initialize``; ``cuda`` as for the class."""
        config = json.loads(args["model_config"])
        if config.get("response_cache", {}).get("enable"):
            raise ModelError(
                f"model {config['name']!r} enables response_cache, which looks at input tensors only: a cached answer "
                "would leave the client's memory as it was; remove response_cache from config.pbtxt"
            )
        device = int(args["model_instance_device_id"]) if args.get("model_instance_kind") == "GPU" else 0
        version = args.get("model_version", "")
        return cls(ModelSpec.from_config(config), Settings.from_config(config), cuda, device, version)

    def serve(self, requests: Iterable[Any], infer: Callable[[Call], None]) -> list[Any]:
        """Run ``infer`` on every request and return one response per request, in order. For ``execute``.

        A request that fails, for whatever reason, fails alone: its response carries the error.
        """
        completion = Completion(self._arrays, self._recorder())
        calls = [self._serve_one(request, infer, completion) for request in requests]
        completion.finish()
        return [call.response for call in calls]

    async def serve_async(self, requests: Iterable[Any], infer: Callable[[Call], Awaitable[None]]) -> list[Any]:
        """As :meth:`serve`, side by side on the event loop, for an ``execute`` that is a coroutine itself."""
        completion = Completion(self._arrays, self._recorder())
        calls = await asyncio.gather(*[self._serve_one_async(request, infer, completion) for request in requests])
        completion.finish()
        return [call.response for call in calls]

    def open(self, request: Any) -> Call:
        """Return one request as a context manager, for code that wants the loop itself.

        Entering it raises a :class:`ShmError` if the request cannot be served: its kind tells whose fault that is.

        Raises
        ------
        ClosedError
            The session was closed.
        """
        return self._new_call(self._open_instance(), request)

    def serve_batch(self, requests: Iterable[Any], infer: Callable[[BatchCall], None]) -> list[Any]:
        """Run ``infer`` on all requests at once, and return one response per request, in order. For ``execute``.

        A request that is refused is left out, and answered with its error. Requests whose inputs differ in more than
        their rows cannot be one batch: then ``infer`` runs for each kind of them.

        Raises
        ------
        ModelError
            The model's configuration has ``max_batch_size: 0``: its requests have no rows.
        """
        instance = self._open_instance()
        if instance.spec.max_batch_size == 0:
            raise ModelError(f"model {instance.spec.name!r} has max_batch_size 0, so that its requests make no batch")
        completion = Completion(self._arrays, self._recorder())
        batches: dict[tuple[Any, ...], list[Call]] = {}
        calls = [self._begin(self._new_call(instance, request, completion), batches) for request in requests]
        for number, batch in enumerate(batches.values()):
            self._infer_batch(sorted(batch, key=_position), infer, number)
        completion.finish()
        return [call.response for call in calls]

    def serve_streams(self, requests: Sequence[Any], answer: Callable[[StreamCall], Iterable[object] | None]) -> None:
        """Run ``answer`` on every request of a decoupled model. For ``execute``, which returns nothing then.

        If it is a generator, what was written is sent at each ``yield``. A generator whose client does not want more
        is closed. Several requests are served side by side, each in a thread.
        """
        if len(requests) == 1:
            self._serve_stream(requests[0], answer)
            return
        with concurrent.futures.ThreadPoolExecutor(max(len(requests), 1), "shm stream") as threads:
            for request in requests:
                threads.submit(self._serve_stream, request, answer)

    def stream(self, request: Any) -> StreamCall:
        """Return one request of a decoupled model as a context manager.

        Entering it raises a :class:`ShmError` if the request cannot be served; the client was answered then.
        """
        return StreamCall(self._open_instance(), request, self._settings.stream_patience_s)

    def close(self) -> None:
        """Unmap every region. Arrays that still live keep theirs. Closing twice is fine."""
        if self._instance is not None:
            if self._metrics is not None:
                self._metrics.close()
            self._instance.close()
            self._instance = None
            self._buffers.close()
            self._events = None

    def _begin(self, call: Call, batches: dict[tuple[Any, ...], list[Call]]) -> Call | _Failed:
        """Enter a call and add it to those of its kind."""
        try:
            call.__enter__()
        except Exception as error:
            self._log(error)
            return _Failed(self._backend.error_response(error))
        try:
            batches.setdefault(call.kind, []).append(call)
        except Exception as error:
            call.end_by(error)
        return call

    def _infer_batch(self, calls: list[Call], infer: Callable[[BatchCall], None], number: int) -> None:
        batch = BatchCall(calls, Gathering(self._buffers, self._arrays, number))
        try:
            infer(batch)
            batch.commit()
        except Exception as error:
            self._log(error)
            for call in calls:
                call.end_by(error)
            return
        for call in calls:
            try:
                call.__exit__(None, None, None)
            except Exception as error:
                self._log(error)
                call.response = self._backend.error_response(error)

    def _recorder(self) -> EventRecorder | None:
        if self._settings.gpu_events and self._events is None and self._cuda.is_loaded:
            self._events = EventRecorder(self._cuda.runtime)
        return self._events

    def _open_instance(self) -> Instance:
        if self._instance is None:
            raise ClosedError("this session")
        return self._instance

    def _serve_stream(self, request: Any, answer: Callable[[StreamCall], Iterable[object] | None]) -> None:
        stream = self.stream(request)
        try:
            with stream as call, contextlib.ExitStack() as at_end:
                steps = answer(call)
                if isinstance(steps, Generator):
                    at_end.callback(steps.close)
                for _ in steps or ():
                    call.send()
        except Exception as error:  # the client knows; the next request must be served all the same
            self._log(error)
            if self._metrics is not None:
                self._metrics.refused(error)
        else:
            if self._metrics is not None:
                self._metrics.answered(stream.path, 0, 0)

    async def _serve_one_async(
        self, request: Any, infer: Callable[[Call], Awaitable[None]], completion: Completion
    ) -> Call | _Failed:
        try:
            with self._new_call(self._open_instance(), request, completion) as call:
                await infer(call)
        except Exception as error:
            self._log(error)
            return _Failed(self._backend.error_response(error))
        return call

    def _log(self, error: Exception) -> None:
        """Write to the server's log what is not of this package's making, and so may be hard to find."""
        if not isinstance(error, ShmError):
            self._backend.log_error("".join(traceback.format_exception(error)))

    def _serve_one(self, request: Any, infer: Callable[[Call], None], completion: Completion) -> Call | _Failed:
        try:
            with self._new_call(self._open_instance(), request, completion) as call:
                infer(call)
        except Exception as error:  # whatever it is, only this request may fail
            self._log(error)
            return _Failed(self._backend.error_response(error))
        return call


def _position(call: Call) -> tuple[Any, ...]:
    """Sort requests in the order of their memory, so that as many as can be follow one another; others come last."""
    plan = call.direct_plan
    return (1,) if plan is None else (0, *plan.position)


class _Failed(NamedTuple):
    """A call that came to nothing."""

    response: Any
