"""What ``config.pbtxt`` says of regions, refused lines, advice for its author; and where the server serves HTTP."""

from __future__ import annotations

import difflib
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import numpy as np

from ..dtypes import BYTES
from ..errors import ModelError
from ..memory.backend_pools import USUAL_PREFIX, prefix_of_pools
from ..model_spec import PATHS_PARAMETER, UIDS_PARAMETER, ModelSpec

__all__ = ["PARAMETERS", "PREFIX", "Config", "advice", "refused_lines", "url_of_parent", "url_of_server"]

PARAMETERS: Final = frozenset(
    {
        PATHS_PARAMETER,
        UIDS_PARAMETER,
        "SHM_DEBUG",
        "SHM_FOREIGN_REGIONS",
        "SHM_GPU_EVENTS",
        "SHM_HANDOVER_S",
        "SHM_INLINE_BYTES",
        "SHM_MAX_MAPPED_BYTES",
        "SHM_METRICS",
        "SHM_PIN_HOST_MEMORY",
        "SHM_REGISTRATIONS",
        "SHM_SERVER_URL",
        "SHM_STREAM_PATIENCE_S",
        "SHM_STREAM_TOTAL_PATIENCE_S",
    }
)
"""All that this package reads of a model's ``config.pbtxt``."""

PREFIX: Final = "SHM_"
"""What the names of all of them begin with: a model with another one of such a name does not load."""

T = TypeVar("T")

_GONE: Final = "SHM_HUGE_PAGES"
_ROOT: Final = 0
_MOST_DIGITS: Final = 10  # of a user id, which has 32 bits; Python refuses to read thousands
_LONGEST_HANDOVER_S: Final = 60.0  # a client that waits for longer than that has given up


@dataclass(frozen=True)
class Config:
    """What a session is configured to do, by the parameters that ``docs/configuration.md`` lists."""

    allowed_uids: frozenset[int] | None = frozenset({os.geteuid(), _ROOT})  # None for anybody's regions
    foreign_regions: bool = True  # whether requests may name regions that are registered at the server
    checks_registrations: bool = True  # by asking the server for each request, and not every 5 s
    server_url: str = ""  # where it tells what is registered, and what its models are; empty if that is not known
    pool_prefix: str = USUAL_PREFIX  # of the names of the Python backend's own memory, by the command line
    inline_bytes: int = 64 * 2**10  # calls of other models go in band whose tensors are no more, all together
    max_mapped_bytes: int | None = None  # at once; None for no limit
    gpu_events: bool = False  # clients wait by CUDA events for GPUs whose streams the model has named
    pin_host_memory: bool = False  # whether mapped regions of the host are registered with CUDA
    handover_s: float = 1.0  # a request waits at most so long for a sealed region
    stream_patience_s: float = 30.0  # a stream waits so long for its client to release a frame
    stream_total_patience_s: float = 300.0  # and so long for all: how long slow readers can hold an instance
    metrics: bool = False
    debug: bool = False

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Config:
        """Read it from a model's configuration in JSON."""
        for line, why in refused_lines(config):
            raise ModelError(
                f"model {config['name']!r} cannot be served with {line} in its config.pbtxt; remove that: {why}"
            )
        parameters = config.get("parameters", {})
        _check_names(parameters)
        texts = {name: parameters[name].get("string_value", "") for name in parameters if name in PARAMETERS}
        patience_s = _seconds(texts, "SHM_STREAM_PATIENCE_S", cls.stream_patience_s)
        total_patience_s = _seconds(texts, "SHM_STREAM_TOTAL_PATIENCE_S", max(cls.stream_total_patience_s, patience_s))
        return cls(
            allowed_uids=_allowed_uids(texts),
            foreign_regions=_is_first_of(texts, "SHM_FOREIGN_REGIONS", "registered", "off"),
            checks_registrations=_is_first_of(texts, "SHM_REGISTRATIONS", "checked", "trusted"),
            server_url=_server_url(texts),
            pool_prefix=prefix_of_pools(),
            inline_bytes=_bytes(texts, "SHM_INLINE_BYTES", 0, cls.inline_bytes),
            max_mapped_bytes=_bytes(texts, "SHM_MAX_MAPPED_BYTES", 1, cls.max_mapped_bytes),
            gpu_events=_is_on(texts, "SHM_GPU_EVENTS"),
            pin_host_memory=_is_on(texts, "SHM_PIN_HOST_MEMORY"),
            handover_s=_seconds(texts, "SHM_HANDOVER_S", cls.handover_s, _LONGEST_HANDOVER_S),
            stream_patience_s=patience_s,
            stream_total_patience_s=total_patience_s,
            metrics=_is_on(texts, "SHM_METRICS"),
            debug=_is_on(texts, "SHM_DEBUG"),
        )


def _check_names(names: Iterable[str]) -> None:
    """Raise ModelError for a name that begins as ours do and is none: what was meant would go without a word."""
    for name in names:
        if name.upper() == _GONE:
            raise ModelError(
                f"parameter {name} went with 0.3: all memory has ordinary pages; remove it from config.pbtxt"
            )
        if name.upper().startswith(PREFIX) and name not in PARAMETERS:
            close = difflib.get_close_matches(name.upper(), PARAMETERS, n=1)
            expected = f"did you mean {close[0]}?" if close else f"expected one of {', '.join(sorted(PARAMETERS))}"
            raise ModelError(f"config.pbtxt has a parameter {name}, which means nothing; {expected}")


def _server_url(texts: Mapping[str, str]) -> str:
    text = texts.get("SHM_SERVER_URL")
    if text is None:
        return url_of_server() or ""
    try:
        place = urlsplit(text)
        is_url = place.scheme in ("http", "https") and place.hostname is not None and place.port != 0
    except ValueError:
        is_url = False
    if not is_url:
        raise ModelError(f"parameter SHM_SERVER_URL is {text!r}; expected http://HOST:PORT")
    return text


def _allowed_uids(texts: Mapping[str, str]) -> frozenset[int] | None:
    text = texts.get(UIDS_PARAMETER)
    if text is None:
        return Config.allowed_uids
    if text.strip() == "any":
        return None
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and len(word) <= _MOST_DIGITS for word in words):
        raise ModelError(f"parameter {UIDS_PARAMETER} is {text!r}; expected user ids, separated by commas, or any")
    return frozenset(int(word) for word in words)


def _is_first_of(texts: Mapping[str, str], name: str, first: str, second: str) -> bool:
    """Return whether a parameter has the first of two words, as it has by default, and not the second."""
    text = texts.get(name, first)
    if text not in (first, second):
        raise ModelError(f"parameter {name} is {text!r}; expected {first} or {second}")
    return text == first


def _is_on(texts: Mapping[str, str], name: str) -> bool:
    text = texts.get(name, "false")
    if text not in ("true", "false"):
        raise ModelError(f"parameter {name} is {text!r}; expected true or false")
    return text == "true"


def _bytes(texts: Mapping[str, str], name: str, least: int, default: T) -> int | T:
    text = texts.get(name)
    if text is None:
        return default
    if not text.strip().isdecimal() or int(text) < least:
        raise ModelError(f"parameter {name} is {text!r}; expected a number of bytes, {least} or more")
    return int(text)


def _seconds(texts: Mapping[str, str], name: str, default: float, most: float = math.inf) -> float:
    text = texts.get(name)
    if text is None:
        return default
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not (0 < seconds < math.inf and seconds <= most):
        bound = f" and at most {most:g}" if most < math.inf else ""
        raise ModelError(f"parameter {name} is {text!r}; expected seconds, more than 0{bound}")
    return seconds


def refused_lines(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the lines of a configuration in JSON that no session can serve, each with the reason."""
    sequences = config.get("sequence_batching") or {}
    if config.get("response_cache", {}).get("enable"):
        yield (
            "response_cache { enable: true }",
            "it looks at input tensors only: a cached answer would leave the client's memory as it was",
        )
    if sequences.get("iterative_sequence"):
        yield (
            "iterative_sequence: true",
            "the server executes a request again whose memory is the client's by then, and crashes where the first "
            "time has ended it; send several responses from one execute, by session.stream",
        )
    if sequences.get("state"):
        yield (
            "state [ … ]",
            "Triton's Python backend cannot give the next state, so that each request would get the first one; keep it "
            "in model.py, by call.sequence",
        )
    for field in ("batch_input", "batch_output"):
        if config.get(field):
            yield f"{field} [ … ]", "Triton's Python backend does nothing about it; each call knows its own rows"
    paths = config.get("parameters", {}).get(PATHS_PARAMETER, {}).get("string_value", "")
    if config.get("model_warmup") and {word.strip() for word in paths.split(",")} == {"direct"}:
        yield (
            "model_warmup [ … ]",
            f'Triton sends it in band, which {PATHS_PARAMETER} refuses; let that be "direct,inline", or warm up in '
            "initialize",
        )
    for tensor in config.get("output", ()):
        if tensor.get("reshape") is not None and tensor.get("data_type") == "TYPE_STRING":
            yield (
                f"a reshape of output {tensor['name']!r}",
                "strings that find no room in the client's memory come back as bytes, which Triton would reshape",
            )


_PROGRAM: Final = "tritonserver"
_ALLOW: Final = "--allow-http"
_ADDRESS: Final = "--http-address"
_PORT: Final = "--http-port"
_DEFAULT_PORT: Final = "8000"
_OFF: Final = frozenset({"false", "0"})
_LOOPBACK: Final = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}
"""How a server that listens everywhere is reached."""
_MEANS_MORE: Final = "localhost"
"""Which may mean another address than the server's, where anybody may listen."""
_VERTEX_AI: Final = ("AIP_MODE", "PREDICTION")
"""An environment in which builds for Vertex AI serve no HTTP, unless they are told to (``command_line_parser.cc``)."""
_BACKEND: Final = "triton_python_backend_utils"
_EMULATED: Final = "__server_url__"


def url_of_server() -> str | None:
    """Return the URL of the server that has started this process; None if that cannot be told.

    Where the Python backend is an emulated one, no server has: the backend says where its own is.
    """
    emulated: str | None = getattr(sys.modules.get(_BACKEND), _EMULATED, None)
    return emulated or url_of_parent()


def url_of_parent() -> str | None:
    """Return the URL of the tritonserver that this process is a stub of; None if that cannot be told.

    By its command line: the parent may be no tritonserver but a process that has one inside, or serve no HTTP. Then
    whoever listens at the usual port is somebody else.
    """
    try:
        words = os.fsdecode(Path(f"/proc/{os.getppid()}/cmdline").read_bytes()).split("\0")
    except OSError:
        return None
    if PurePath(words[0]).name != _PROGRAM or any(map(_is_abbreviated, words)):
        return None
    allowed = _option(words, _ALLOW)
    name, value = _VERTEX_AI
    if allowed is None and os.environ.get(name) == value:
        return None
    address = _option(words, _ADDRESS) or ""
    if (allowed or "").lower() in _OFF or address == _MEANS_MORE:
        return None
    host = _LOOPBACK.get(address, address)
    port = _option(words, _PORT) or _DEFAULT_PORT
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _is_abbreviated(word: str) -> bool:
    """Return whether a word may be short for an option that counts here, which getopt_long(3) allows."""
    name = word.partition("=")[0]
    return len(name) > 2 and any(option.startswith(name) and option != name for option in (_ALLOW, _ADDRESS, _PORT))


def _option(words: Sequence[str], name: str) -> str | None:
    """Return the last value of an option, which is what counts."""
    found = None
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word == name:
            found = following
        elif word.startswith(f"{name}="):
            found = word.partition("=")[2]
    return found


def advice(spec: ModelSpec, config: Mapping[str, Any], *, stub_reads_numpy: bool) -> Iterator[str]:
    """Yield lines for the server's log: what keeps clients from a model, what is never batched, what strings will do.

    ``stub_reads_numpy`` is whether Triton's stub was built for the NumPy that the model has.
    """
    if spec.paths is None:
        yield (
            f"no client shares memory with model {spec.name!r}, though it makes a ShmSession: add to its config.pbtxt: "
            f'parameters {{ key: "{PATHS_PARAMETER}" value: {{ string_value: "direct,triton-shm,inline" }} }}'
        )
        obstacle = spec.obstacle_in_inputs()
        if obstacle is not None:
            yield f"the same goes for this: {obstacle}"
    ragged = {tensor["name"] for tensor in config.get("input", ()) if tensor.get("allow_ragged_batch")}
    varying = [name for name, tensor in spec.inputs.items() if -1 in tensor.shape[1:] and name not in ragged]
    if "dynamic_batching" in config and varying and spec.paths != frozenset({"direct"}):
        yield (
            f"model {spec.name!r} has inputs of varying size ({', '.join(varying)}): in band, Triton batches no "
            "requests in which these differ, and executes each alone, unlike on the direct path; where they do differ, "
            "add `allow_ragged_batch: true` to these inputs in its config.pbtxt"
        )
    if not stub_reads_numpy:
        strings = [name for each in (spec.inputs, spec.outputs) for name, t in each.items() if t.dtype is BYTES]
        if strings:
            yield (
                f"Triton's stub was built for NumPy 1, and model {spec.name!r} has NumPy {np.__version__}: a request "
                f"that carries strings ({', '.join(strings)}) itself ends this instance's process; those on the direct "
                "path are not affected; install numpy<2 for the model, or use a newer Triton"
            )
