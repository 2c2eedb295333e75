"""A client's requests to its server besides inference: its health, its models, and loading of models.

A Python model is alive if its processes are. In ``/proc`` they are children of the process that listens on the port.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
import urllib.parse
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from ..errors import CallerError, MachineError, code_in
from ..model_spec import ModelSpec, is_of_python_backend
from ..protocol.probe import ALIVE_ADDRESS
from .core import Core
from .errors import DeadlineExceededError, InferenceError, LivenessUnknownError, ServerUnavailableError
from .paths.call import is_answer, is_at_least
from .paths.choice import ask_session
from .settings import ClientSettings
from .steps import Pause, Send, Steps, offloaded
from .transports.messages import Codec, Question
from .transports.transport import is_this_machine

__all__ = [
    "ask",
    "instances_of",
    "is_model_ready",
    "is_of_dead_process",
    "is_so",
    "living_in",
    "load",
    "notices_dead_models",
    "sign_of_life",
    "start",
    "unload",
]

_ATTEMPT_S: Final = 2.0
_PAUSE_S: Final = 0.1
_SEQUENCE_WAIT_S: Final = 2.0  # the server needs one second to notice a dead process
notices_dead_models: Final = partial(is_at_least, (2, 65))  # whether the server itself does: Triton from 26.01 on
_NOT_CONTROLLED: Final = "explicit model load / unload is not allowed"
_DEAD: Final = re.compile(r"(?i)stub process .*(not healthy|unhealthy)")
_PROC: Final = Path("/proc")
_SERVER: Final = "tritonserver"
_STUB: Final = "triton_python_backend_stub"
_LISTENS: Final = "0A"
_PORTS: Final[Mapping[str, int]] = {"http": 80, "https": 443, "grpcs": 443}


def start(core: Core, settings: ClientSettings) -> Steps[None]:
    """Check that a server answers; with ``wait_ready_s``, wait until it is ready."""
    if settings.wait_ready_s is None:
        yield from core.check_server_answers(time.monotonic() + settings.timeout_s)
        return
    deadline = time.monotonic() + settings.wait_ready_s
    while True:
        error: InferenceError | ServerUnavailableError
        try:
            if (yield from is_so(core.codec, min(deadline, time.monotonic() + _ATTEMPT_S), "server ready")):
                return
            error = ServerUnavailableError(
                "a server answers, but it is not ready: a model is not loaded yet, or a model's process is not alive"
            )
        except (DeadlineExceededError, ServerUnavailableError) as found:
            error = found
        if time.monotonic() + _PAUSE_S > deadline:
            raise error
        yield Pause(_PAUSE_S)


def ask(codec: Codec, deadline: float, question: Question, model: str = "", version: str = "") -> Steps[dict[str, Any]]:
    """Return the server's answer, in JSON's types."""
    answer = yield Send(codec.ask(question, model, version), deadline)
    return codec.as_dict(answer)


def is_so(codec: Codec, deadline: float, question: Question, model: str = "", version: str = "") -> Steps[bool]:
    try:
        return codec.says_so((yield Send(codec.ask(question, model, version), deadline)))
    except InferenceError as error:
        if not is_answer(error):
            raise
        return False  # HTTP says no by an error, and so does gRPC for a model that the server lacks


def is_model_ready(codec: Codec, deadline: float, model: str, version: str) -> Steps[bool]:
    """Return whether a model is loaded and alive; of an ensemble, whether its steps are."""
    if not (yield from is_so(codec, deadline, "model ready", model, version)):
        return False
    config = yield from ask(codec, deadline, "model config", model, version)
    for step in config.get("ensemble_scheduling", {}).get("step", ()):
        pinned = str(step.get("model_version", "")).removeprefix("-1")  # "-1" means the latest version
        if not (yield from is_model_ready(codec, deadline, str(step["model_name"]), pinned)):
            return False
    if not is_of_python_backend(config):
        return True
    living = yield from living_in(codec, deadline, config, version)
    if living is not None and living < instances_of(config):
        return False
    trouble = yield from sign_of_life(codec, deadline, config, version)
    if trouble is None and living is None and not (yield from notices_dead_models(codec, deadline)):
        raise LivenessUnknownError(
            f"cannot tell from here whether the process of model {model!r} is alive: this Triton calls dead models "
            "ready, too, no session has answered, and this process cannot see the server's. Check on the server's "
            "machine, in its container and as its user, or send a request that the model answers"
        )
    return not trouble


def living_in(codec: Codec, deadline: float, config: Mapping[str, Any], version: str) -> Steps[int | None]:
    """Return how many processes of a Python model's version are alive; None if this process cannot see them."""
    if not codec.address:
        return None
    metadata = yield from ask(codec, deadline, "model metadata", str(config["name"]))
    versions = [each for each in metadata.get("versions") or () if isinstance(each, str)]
    if len(versions) < 2:  # the folder of a single version may have any name
        version = ""
    elif not version:
        version = max(versions, key=lambda each: (len(each), each))
    look = partial(living_processes, codec.address, config, version)
    return (yield from offloaded(look, deadline, "the server's processes were looked at"))


def instances_of(config: Mapping[str, Any]) -> int:
    """Return how many processes a Python model has by its configuration: at least one."""
    groups = config.get("instance_group", ())
    return max(sum(int(group.get("count") or 1) * max(len(group.get("gpus") or ()), 1) for group in groups), 1)


def sign_of_life(codec: Codec, deadline: float, config: Mapping[str, Any], version: str) -> Steps[str | None]:
    """Return the problem that a model's session reports, empty if it reports no problem; None if it cannot say."""
    spec = ModelSpec.from_config(config)
    if spec.obstacle_in_paths() is not None or spec.obstacle_in_inputs() is not None:
        return None
    if spec.sequences:
        deadline = min(deadline, time.monotonic() + _SEQUENCE_WAIT_S)
    try:
        message = yield from ask_session(codec, spec, (ALIVE_ADDRESS, 1), deadline, version)
    except DeadlineExceededError:
        if not spec.sequences:
            raise
        return None
    except CallerError:
        return None
    if message is None:
        return ""
    code = code_in(message)
    if code == MachineError.code or is_of_dead_process(message):
        return message
    return "" if code else None  # an earlier release's session refuses the request


def is_of_dead_process(message: str) -> bool:
    """Return whether the server refused a request because the model's process is dead."""
    return _DEAD.search(message) is not None


def load(codec: Codec, deadline: float, model: str, config: str | None, files: Mapping[str, bytes]) -> Steps[None]:
    parameters: dict[str, str | bytes] = {**files}
    if config is not None:
        parameters["config"] = config
    yield from _control(Send(codec.load(model, parameters), deadline))


def unload(codec: Codec, deadline: float, model: str, dependents: bool) -> Steps[None]:
    yield from _control(Send(codec.unload(model, dependents=dependents), deadline))


def _control(message: Send) -> Steps[None]:
    try:
        yield message
    except InferenceError as error:
        if _NOT_CONTROLLED not in str(error):
            raise
        raise InferenceError(
            "this server does not let clients load and unload models; start it with --model-control-mode=explicit "
            f"({error.message()})",
            error.status(),
        ) from None


def living_processes(address: str, config: Mapping[str, Any], version: str) -> int | None:
    """Return how many processes of a Python model are alive; None if this process cannot see the server's."""
    url = urllib.parse.urlsplit(address)
    port = url.port or _PORTS.get(url.scheme)
    if not url.hostname or port is None or not is_this_machine(url.hostname):
        return None
    sockets = {*_listening(port)}
    parents = {pid: words for pid, _, words in _processes(_SERVER)}
    stubs = [(parent, words) for _, parent, words in _processes(_STUB)]
    servers = [pid for pid in {*parents, *(parent for parent, _ in stubs)} if _has_any(pid, sockets)]
    if len(servers) != 1:
        return None
    groups = "|".join(re.escape(str(group.get("name"))) for group in config.get("instance_group", ()))
    name = re.compile(rf"(?:{groups})(?:_[0-9]+)?")
    model, folders = str(config["name"]), []
    for parent, words in stubs:
        *_, folder, found_version, _ = ("", "", "", *Path(words[1]).parts)
        if parent != servers[0] or version not in ("", found_version):
            continue
        names = filter(name.fullmatch, words[2:])
        if any(folder == model or not each.startswith(f"{folder}_") for each in names):  # else another model's folder
            folders.append(folder)
    return folders.count(model) or len(folders)  # a model that the server has fetched lies in a folder of another name


def _processes(program: str) -> Iterator[tuple[int, int, list[str]]]:
    """Yield PID, parent PID and command line of each process that runs a program; an ended one has no command line."""
    for folder in _PROC.glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process has ended meanwhile
            words = os.fsdecode((folder / "cmdline").read_bytes()).split("\0")
            if Path(words[0]).name == program:
                parent = (folder / "stat").read_bytes().rpartition(b")")[2].split()[1]
                yield int(folder.name), int(parent), words


def _listening(port: int) -> Iterator[str]:
    """Yield ``socket:[…]``, the target of its descriptor's link, for each socket that listens on a port here."""
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in (_PROC / "net" / table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENS and int(fields[1].rpartition(":")[2], 16) == port:
                    yield f"socket:[{fields[9]}]"


def _has_any(pid: int, sockets: set[str]) -> bool:
    try:
        return any(str(each.readlink()) in sockets for each in (_PROC / str(pid) / "fd").iterdir())
    except OSError:  # the process is another user's, or has ended
        return False
