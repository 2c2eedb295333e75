"""A stub process: it calls model.py, checks the responses, and asks its server. In any process."""

from __future__ import annotations

import asyncio
import json
import threading
import weakref
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

from ..emulator import (
    Delivery,
    TensorContent,
    TritonModelException,
    backend_module,
    deliver,
    deliver_response,
    sent_inputs,
    sent_outputs,
)
from ..emulator.host import Faults, Services
from ..emulator.pybind import ErrorCode, TritonError
from .model_folder import ModelCode
from .requests import Outcome

__all__ = ["ModelCall", "Receiver", "ServerCalls", "Stub", "StubError"]

SERVER_URL: Final = "__server_url__"
"""The backend module's attribute with the URL at which the emulated server lists registered memory."""
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


class ServerCalls(Services, Protocol):
    """The server of a stub."""

    def call_model(self, call: ModelCall) -> Iterator[Outcome]:
        """Let another model execute a request, and return its responses as they come."""


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
    """Gets the responses to one request."""

    def put(self, outcome: Outcome) -> None:
        """Take a response."""

    def fail(self, message: str, code: str = ...) -> None:
        """Take an error as the last response."""

    def let_go(self) -> None:
        """Note that no model can answer any more."""

    def is_cancelled(self) -> bool:
        """Return whether no client waits any more."""


class Stub:
    """One instance of a model's code, whose host it is; at ``server_url`` the server lists registered memory."""

    def __init__(self, file: Path, name: str, calls: ServerCalls, server_url: str, faults: Faults) -> None:
        self._file = file
        self._name = name
        self._is_executing = False
        self._call_model = calls.call_model
        self.metrics, self.log, self.load_model = calls.metrics, calls.log, calls.load_model
        self.unload_model, self.is_model_ready = calls.unload_model, calls.is_model_ready
        self._backend = backend_module(self, faults)
        vars(self._backend)[SERVER_URL] = server_url
        self._code = ModelCode(file, self._backend)
        self._class: Any = None
        self._model: Any = None
        self._model_name = ""
        self._model_version = 1
        self._is_decoupled = False
        self._loop: asyncio.AbstractEventLoop | None = None

    def is_executing(self) -> bool:
        """See :class:`.Host`, also for all methods down to :meth:`cancel`."""
        return self._is_executing

    def model_dir(self) -> str:
        return str(self._file.parent)

    def instance_name(self) -> str:
        return self._name

    def infer(self, request: Any) -> Any:
        *_, found = (each for each in self._call_model(_call(request, takes_many=False)) if not each.is_empty)
        return self._response(found)

    def stream(self, request: Any) -> Iterator[tuple[Any, bool]]:
        for outcome in self._call_model(_call(request, takes_many=True)):
            yield self._response(outcome), outcome.is_final

    def cancel(self, request: Any) -> None:
        """Do nothing, so the other model goes on; on a server, it can check whether it is cancelled."""

    def load(self) -> None:
        """See :class:`.Instance`, also for all down to :meth:`finalize`; StubError if the class is missing."""
        with _as_the_stub_tells():
            self._class = self._code.load()

    def auto_complete(self, config: str) -> str | None:
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

    def initialize(self, args: Mapping[str, str], is_decoupled: bool) -> None:
        self._model_name, self._model_version = args["model_name"], int(args["model_version"])
        self._name = args["model_instance_name"]
        self._is_decoupled = is_decoupled
        with _as_the_stub_tells():
            model = self._class()
            if hasattr(model, "initialize"):
                model.initialize(dict(args))
        self._model = model  # a server never calls finalize of one whose initialize raised
        self._is_executing = True

    def execute(self, deliveries: Sequence[Delivery], receivers: Sequence[Receiver]) -> None:
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
        if not hasattr(self._model, "is_ready"):
            return True
        try:
            answer = self._model.is_ready()
            if asyncio.iscoroutine(answer):
                answer = asyncio.run_coroutine_threadsafe(answer, self._running_loop()).result()
            if not isinstance(answer, bool):
                raise StubError("is_ready() must return a boolean value")
        except Exception as error:
            self._backend.Logger.log_error(f"Model '{self._name}': {message_of(error)}")
            return False
        return answer

    def finalize(self) -> None:
        self._is_executing = False
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

    def _response(self, outcome: Outcome) -> Any:
        if outcome.error is not None:
            message, code = outcome.error
            return deliver_response(self._backend, [], TritonError(message, ErrorCode[code]))
        return deliver_response(self._backend, outcome.outputs)

    def _deliver(self, delivery: Delivery, receiver: Receiver) -> Any:
        return deliver(
            self._backend,
            delivery,
            model_name=self._model_name,
            model_version=self._model_version,
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
            self._backend.Logger.log_error(f"Model '{self._name}': a coroutine failed: {message_of(error)}")

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
        sent_error = None if error is None else (error.message(), error.code().name)
        self._receiver.put(Outcome(sent_outputs(response), sent_error, is_final, parameters=response.parameters()))


class _as_the_stub_tells:  # noqa: N801  # a context manager; as a generator it would cost every request more
    """Reports the model's errors as pybind11 does it in a real stub."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None or isinstance(error, StubError):
            return
        if isinstance(error, KeyboardInterrupt):  # the user's, not the model's
            return
        raise StubError(message_of(error)) from error


def message_of(error: BaseException) -> str:
    """Return an error's text with the lines of its traceback outside this folder, the innermost first."""
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
