"""A stub process: it calls model.py, checks the responses, and asks its server. In any process."""

from __future__ import annotations

import asyncio
import json
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NamedTuple, Protocol

from ..emulator import (
    MetricsRegistry,
    TensorContent,
    TritonModelException,
    backend_module,
    deliver,
    deliver_response,
    sent_inputs,
    sent_outputs,
)
from ..emulator.host import Faults
from ..emulator.pybind import ErrorCode, TritonError
from .model_folder import ModelCode
from .requests import Delivery, Outcome

__all__ = ["ModelCall", "Receiver", "ServerCalls", "Stub", "StubError"]

SERVER_URL: Final = "__server_url__"
"""Of the backend module: where the emulated server says what is registered."""
_HERE: Final = str(Path(__file__).parent)
_FINAL: Final = 1


class ModelCall(NamedTuple):
    """A request that one model makes of another; it can be pickled."""

    model: str
    version: str  # empty if the server chooses
    request_id: str
    correlation_id: int | str
    inputs: list[TensorContent]
    outputs: tuple[str, ...]
    parameters: dict[str, Any]
    flags: int
    timeout_us: int
    takes_many: bool  # a decoupled model may answer


class ServerCalls(Protocol):
    """The server's services for a stub. A refusal is a ``TritonModelException`` with the server's words."""

    @property
    def metrics(self) -> MetricsRegistry:
        """The metric families that models have made."""

    def call_model(self, call: ModelCall) -> Iterator[Outcome]:
        """Have another model execute a request, and return its responses as they come."""

    def log(self, level: str, message: str) -> None:
        """Write to the server's log."""

    def load_model(self, name: str, config: str, files: Mapping[str, bytes]) -> None:
        """Load a model."""

    def unload_model(self, name: str, *, with_dependents: bool) -> None:
        """Unload a model."""

    def is_model_ready(self, name: str, version: str) -> bool:
        """Return whether a model can execute requests."""


class StubHost:
    """The host of one emulated stub.

    ``is_executing`` returns whether the model is past ``initialize`` and not yet in ``finalize``; ``instance_name``
    the server's name for the instance.
    """

    backend: ModuleType

    def __init__(
        self,
        calls: ServerCalls,
        folder: Path,
        is_executing: Callable[[], bool],
        instance_name: Callable[[], str],
    ) -> None:
        self._folder = folder
        self.is_executing = is_executing
        self.instance_name = instance_name
        self._calls = calls
        self.log = calls.log
        self.load_model = calls.load_model
        self.unload_model = calls.unload_model
        self.is_model_ready = calls.is_model_ready

    @property
    def metrics(self) -> MetricsRegistry:
        """The metric families that models have made."""
        return self._calls.metrics

    def model_dir(self) -> str:
        """Return the folder of the model's version."""
        return str(self._folder)

    def infer(self, request: Any) -> Any:
        """Have another model execute a request, and return its one response."""
        found: Outcome | None = None
        for outcome in self._calls.call_model(_call(request, takes_many=False)):
            if found is None or not outcome.is_empty:
                found = outcome
        assert found is not None  # there is a last one
        return self._response(found)

    def stream(self, request: Any) -> Iterator[tuple[Any, bool]]:
        """Return the responses to a request, each with whether it is the last."""
        for outcome in self._calls.call_model(_call(request, takes_many=True)):
            yield self._response(outcome), outcome.is_final

    def cancel(self, request: Any) -> None:
        """Take no notice, and the other model goes on: a real one may look whether it is cancelled."""

    def _response(self, outcome: Outcome) -> Any:
        if outcome.error is not None:
            message, code = outcome.error
            return deliver_response(self.backend, [], TritonError(message, ErrorCode[code]))
        return deliver_response(self.backend, outcome.outputs)


def _call(request: Any, *, takes_many: bool) -> ModelCall:
    version = request._model_version
    return ModelCall(
        request._model_name,
        "" if version == -1 else str(version),
        request.request_id(),
        request.correlation_id(),
        sent_inputs(request),
        tuple(request.requested_output_names()),
        json.loads(request.parameters() or "{}"),
        request.flags(),
        request.timeout(),
        takes_many,
    )


class Receiver(Protocol):
    """Where the responses to one request go."""

    def put(self, outcome: Outcome) -> None:
        """Take a response."""

    def fail(self, message: str, code: str = ...) -> None:
        """Take an error as the last response."""

    def let_go(self) -> None:
        """Note that no model can answer any more."""

    def is_cancelled(self) -> bool:
        """Return whether no client waits any more."""


class Stub:
    """One instance of a model's code, whose name errors tell.

    At ``server_url`` the server lists registered memory.
    """

    def __init__(self, file: Path, name: str, calls: ServerCalls, server_url: str, faults: Faults) -> None:
        self._file = file
        self._name = name
        self.is_executing = False
        host = StubHost(calls, file.parent, lambda: self.is_executing, lambda: self._name)
        host.backend = self._backend = backend_module(host, faults)
        vars(self._backend)[SERVER_URL] = server_url
        self._code = ModelCode(file, self._backend)
        self._class: Any = None
        self._model: Any = None
        self._model_name = ""
        self._model_version = 1
        self._is_decoupled = False
        self._loop: asyncio.AbstractEventLoop | None = None

    def load(self) -> None:
        """Import model.py; StubError if that fails, or it has no ``TritonPythonModel``."""
        with _as_the_stub_tells():
            self._class = self._code.load()

    def auto_complete(self, config: str) -> str | None:
        """Return a configuration, as JSON, as the model completes it; None if the model has nothing to say.

        StubError if the model raised, or returned something else.
        """
        kind = self._backend.ModelConfig
        if not hasattr(self._class, "auto_complete_config"):
            return None
        with _as_the_stub_tells():
            completed = self._class.auto_complete_config(kind(config))
        if not isinstance(completed, kind):
            raise StubError(
                f"auto_complete_config function in model '{self._name}' must return a valid pb.ModelConfig object."
            )
        return json.dumps(completed._model_config)

    def initialize(self, args: Mapping[str, str], *, is_decoupled: bool) -> None:
        """Make the model and call its ``initialize``; StubError if it raised."""
        self._model_name, self._model_version = args["model_name"], int(args["model_version"])
        self._name = args["model_instance_name"]
        self._is_decoupled = is_decoupled
        with _as_the_stub_tells():
            model = self._class()
            if hasattr(model, "initialize"):
                model.initialize(dict(args))
        self._model = model  # a server never calls finalize of one whose initialize raised
        self.is_executing = True

    def execute(self, deliveries: Sequence[Delivery], receivers: Sequence[Receiver]) -> None:
        """Have the model execute requests; their answers arrive with their receivers, maybe later."""
        requests = [self._deliver(each, receiver) for each, receiver in zip(deliveries, receivers, strict=True)]
        try:
            if not hasattr(self._model, "execute"):
                raise StubError(f"Python model {self._file} does not implement `execute` method.")
            with _as_the_stub_tells():
                returned = self._model.execute(requests)
                if asyncio.iscoroutine(returned):
                    returned = self._run(returned)
            self._answer(requests, returned)
        except StubError as error:
            text = f"Failed to process the request(s) for model '{self._name}', message: {error}"
            for receiver in receivers:
                receiver.fail(text)
            return
        responses = returned if isinstance(returned, list) else [None] * len(requests)
        returned = None
        for response, receiver in zip(responses, receivers, strict=True):
            request = requests.pop(0)
            if response is None:  # the sender's holder may still answer
                weakref.finalize(request.get_response_sender(), receiver.let_go).atexit = False
            del request

    def is_ready(self) -> bool:
        """Return the answer of the model's ``is_ready``, which Triton asks from 26.03 on; True without one."""
        if not hasattr(self._model, "is_ready"):
            return True
        try:
            answer = self._model.is_ready()
            if asyncio.iscoroutine(answer):
                answer = asyncio.run_coroutine_threadsafe(answer, self._running_loop()).result()
            if not isinstance(answer, bool):
                raise StubError("is_ready() must return a boolean value")
        except Exception as error:
            self._backend.Logger.log_error(f"Model '{self._name}': {told(error)}")
            return False
        return answer

    def finalize(self) -> None:
        """Call the model's ``finalize``, and let go of it."""
        self.is_executing = False
        model, self._model = self._model, None
        try:
            if hasattr(model, "finalize"):
                with _as_the_stub_tells():
                    model.finalize()
        finally:
            del model
            self._stop_loop()
            self._class = None
            self._code.close()

    def _deliver(self, delivery: Delivery, receiver: Receiver) -> Any:
        return deliver(
            self._backend,
            model_name=self._model_name,
            model_version=self._model_version,
            request_id=delivery.request_id,
            correlation_id=delivery.correlation_id,
            inputs=delivery.inputs,
            requested_output_names=delivery.requested_output_names,
            parameters=delivery.parameters,
            flags=delivery.flags,
            timeout_us=delivery.timeout_us,
            is_decoupled=self._is_decoupled,
            sink=_Sink(receiver),
            is_cancelled=receiver.is_cancelled,
        )

    def _answer(self, requests: Sequence[Any], returned: Any) -> None:
        if returned is None:
            return
        if self._is_decoupled:
            raise StubError(
                f"Python model '{self._name}' is using the decoupled mode and the execute function must return None."
            )
        if not isinstance(returned, list):
            raise StubError(f"Expected a list in the execute return, found type '{type(returned)}'.")
        if len(requests) != len(returned):
            raise StubError(
                "Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
                f"InferenceRequest(s) size is:{len(requests)}, and InferenceResponse(s) size is:{len(returned)}\n"
            )
        for response in returned:
            if response is not None and not isinstance(response, self._backend.InferenceResponse):
                raise StubError(
                    "Expected an 'InferenceResponse' object in the execute function return list, found type "
                    f"'{type(response)}'."
                )
        for request, response in zip(requests, returned, strict=True):
            if response is not None:
                try:
                    request.get_response_sender().send(response, _FINAL)
                except TritonModelException as error:
                    raise StubError(str(error)) from None

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine on the stub's event loop; that of a decoupled model goes on in the background."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._running_loop())
        if not self._is_decoupled:
            return future.result()
        future.add_done_callback(lambda done: self._log_failure(done.exception()))
        return None

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name=f"{self._name} events", daemon=True).start()
        return self._loop

    def _log_failure(self, error: BaseException | None) -> None:
        if error is not None:
            self._backend.Logger.log_error(f"Model '{self._name}': a coroutine failed: {told(error)}")

    def _stop_loop(self) -> None:
        loop, self._loop = self._loop, None
        if loop is not None:
            asyncio.run_coroutine_threadsafe(_drain(), loop).result()
            loop.call_soon_threadsafe(loop.stop)
            while loop.is_running():
                threading.Event().wait(0.001)
            loop.close()


class StubError(Exception):
    """A stub's report to its server, in the words of a real one."""


class _Sink:
    """Hands the responses that a model sends on to the waiting caller."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver

    def send(self, response: Any, *, is_final: bool) -> None:
        if response is None:
            self._receiver.put(Outcome([], None, is_final, is_empty=True))
            return
        error = response.error()
        told_error = None if error is None else (error.message(), error.code().name)
        self._receiver.put(Outcome(sent_outputs(response), told_error, is_final, parameters=response.parameters()))


class _as_the_stub_tells:  # noqa: N801  # a context manager; as a generator it would cost every request more
    """Reports the model's errors as pybind11 does it in a real stub."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None or isinstance(error, StubError):
            return
        if isinstance(error, KeyboardInterrupt):  # the user's, not the model's
            return
        raise StubError(told(error)) from error


def told(error: BaseException) -> str:
    """Return an error with its places in the model's code, the innermost first."""
    places: list[str] = []
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if not code.co_filename.startswith(_HERE):
            places.append(f"  {code.co_filename}({trace.tb_lineno}): {code.co_name}")
        trace = trace.tb_next
    text = f"{type(error).__name__}: {error}"
    return text + ("\n\nAt:\n" + "\n".join(reversed(places)) + "\n" if places else "")


async def _drain() -> None:
    """Cancel the tasks that still run on this event loop."""
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_default_executor()
