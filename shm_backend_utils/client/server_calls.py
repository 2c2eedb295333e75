"""What a client asks of its server beside inference: is it there, what does it have, and load this. No I/O.

Each is a generator of :mod:`.steps`, for both clients, and ends by a deadline.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any, Final

from ..errors import CallerError
from ..model_spec import ModelSpec
from ..protocol.layout import VERSION
from .core import Core
from .errors import DeadlineExceededError, InferenceError, ServerUnavailableError
from .paths.exchange import batch_carrier, is_answer, options_of_probe
from .settings import ClientSettings, left_until
from .steps import Pause, Send, SendForStream, Steps
from .transports.messages import Codec, Question, Request

__all__ = ["ask", "is_alive", "is_model_ready", "is_so", "load", "start", "unload"]

_ATTEMPT_S: Final = 2.0
_PAUSE_S: Final = 0.1
_NO_SLOT: Final = (f"{VERSION}/nowhere", 1)
_NOT_CONTROLLED: Final = "explicit model load / unload is not allowed"
_DEAD: Final = re.compile(r"(?i)stub process .*(not healthy|unhealthy)")


def start(core: Core, settings: ClientSettings) -> Steps[None]:
    """Make sure that there is a server; that it is ready, if the client is to wait for that.

    Raises
    ------
    ServerUnavailableError, DeadlineExceededError
        There is none, or it was not ready in time.
    """
    if settings.wait_ready_s is None:
        yield from core.check_server_answers(settings.timeout_s)
        return
    deadline = time.monotonic() + settings.wait_ready_s
    while True:
        error: InferenceError | ServerUnavailableError
        try:
            if (yield from is_so(core.codec, min(deadline, time.monotonic() + _ATTEMPT_S), "server ready")):
                return
            error = ServerUnavailableError("a server answers, but it is not ready: its models are not all loaded")
        except (DeadlineExceededError, ServerUnavailableError) as found:
            error = found
        if time.monotonic() + _PAUSE_S > deadline:
            raise error
        yield Pause(_PAUSE_S)


def ask(codec: Codec, deadline: float, question: Question, model: str = "", version: str = "") -> Steps[dict[str, Any]]:
    """Return what the server answers, in JSON's types."""
    answer = yield Send(codec.ask(question, model, version), left_until(deadline))
    return codec.told(answer)


def is_so(codec: Codec, deadline: float, question: Question, model: str = "", version: str = "") -> Steps[bool]:
    """Return whether the server says yes."""
    try:
        return codec.says_so((yield Send(codec.ask(question, model, version), left_until(deadline))))
    except InferenceError as error:
        if not is_answer(error):
            raise
        return False  # over HTTP it is an error; over gRPC, of a model that the server does not have


def is_model_ready(codec: Codec, deadline: float, model: str, version: str) -> Steps[bool]:
    """Return whether a model is loaded and alive.

    The server says that one is ready whose process is dead. Only a request tells; where the model has a session, that
    refuses one whose slot is none, before ``model.py`` sees it. Where it has none, the server's word must do.
    """
    if not (yield from is_so(codec, deadline, "model ready", model, version)):
        return False
    spec = ModelSpec.from_config((yield from ask(codec, deadline, "model config", model, version)))
    if spec.obstacle_in_paths() is not None or spec.obstacle_in_inputs() is not None:
        return True
    return (yield from is_alive(codec, deadline, spec, version))


def is_alive(codec: Codec, deadline: float, spec: ModelSpec, version: str) -> Steps[bool]:
    """Return whether the process is alive that gets a request to a model, of which the server may have several.

    Nothing keeps requests without tensors from the model. Where it has no streams, as over HTTP, one of a decoupled
    model is never asked, and taken for alive.
    """
    carrier = (batch_carrier(1),) if spec.max_batch_size else ()
    message = codec.infer(Request(spec.name, carrier, None, options_of_probe(spec, version), _NO_SLOT))
    timeout_s = left_until(deadline)
    try:
        yield SendForStream(message, timeout_s) if spec.is_decoupled else Send(message, timeout_s)
    except InferenceError as error:
        if not is_answer(error):
            raise
        return _DEAD.search(str(error)) is None
    except CallerError:  # over HTTP, which has no streams
        return True
    return True


def load(codec: Codec, deadline: float, model: str, config: str | None, files: Mapping[str, bytes]) -> Steps[None]:
    """Have a model loaded, or loaded anew."""
    parameters: dict[str, str | bytes] = {**files}
    if config is not None:
        parameters["config"] = config
    yield from _control(Send(codec.load(model, parameters), left_until(deadline)))


def unload(codec: Codec, deadline: float, model: str, dependents: bool) -> Steps[None]:
    """Have a model unloaded; with ``dependents``, also those that it is made of."""
    yield from _control(Send(codec.unload(model, dependents=dependents), left_until(deadline)))


def _control(message: Send) -> Steps[None]:
    try:
        yield message
    except InferenceError as error:
        if _NOT_CONTROLLED not in str(error):
            raise
        raise InferenceError(
            "this server lets nobody load and unload models; start it with --model-control-mode=explicit "
            f"({error.message()})",
            error.status(),
        ) from None
