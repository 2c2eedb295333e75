"""Reads ``config.pbtxt``: settings, refused lines, advice and completion. Also finds the server's URL."""

from __future__ import annotations

import difflib
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, Final
from urllib.parse import urlsplit

import numpy as np

from ..dtypes import BYTES
from ..errors import ModelError
from ..memory.shared_file import USUAL_POOL_PREFIX, prefix_of_pools
from ..model_spec import BATCH_CARRIER, CARRIER, CARRIER_LINE, PATHS_LINE, PATHS_PARAMETER, UIDS_PARAMETER, ModelSpec
from ..tensors.view import DIRECT

__all__ = ["PARAMETERS", "PREFIX", "Config", "auto_complete", "load_warnings", "refused_lines", "url_of_server"]

PREFIX: Final = "SHM_"
"""The prefix of all parameter names. A model with an unknown parameter of this prefix does not load."""

_GONE: Final = "SHM_HUGE_PAGES"
_ROOT: Final = 0
_MOST_DIGITS: Final = 10  # of a user id of 32 bits; Python refuses to parse thousands of digits
_LONGEST_HANDOVER_S: Final = 60.0  # a client gives up before that


@dataclass(frozen=True)
class Config:
    """A session's settings, from the parameters that ``docs/configuration.md`` lists."""

    allowed_uids: frozenset[int] | None = frozenset({os.geteuid(), _ROOT})  # None to allow every user's regions
    foreign_regions: bool = True  # whether requests may name regions that are registered at the server
    checks_registrations: bool = True  # True: ask the server in every request; False: only every 5 s
    server_url: str = ""  # where to ask about registrations and models; empty if unknown
    pool_prefix: str = USUAL_POOL_PREFIX  # of the Python backend's own regions, from the command line
    inline_bytes: int = 64 * 2**10  # call.forward sends tensors in band up to this total
    max_mapped_bytes: int | None = None  # in total; None for no limit
    gpu_events: bool = False  # clients wait for GPUs, if the model has named its streams
    pin_host_memory: bool = False  # whether mapped host regions are registered with CUDA
    handover_s: float = 1.0  # the longest wait of a request for a sealed region
    stream_patience_s: float = 30.0  # the longest wait of a stream for its client to release a frame
    stream_total_patience_s: float = 300.0  # the longest sum of such waits in one stream
    metrics: bool = False
    debug: bool = False

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Config:
        for line, why in refused_lines(config):
            raise ModelError(
                f"model {config['name']!r} cannot be served with {line} in its config.pbtxt; remove that: {why}"
            )
        parameters = config.get("parameters", {})
        _check_names(parameters)
        found: dict[str, Any] = {
            field: read(name, parameters[name].get("string_value", ""))
            for name, (field, read) in _READERS.items()
            if name in parameters
        }
        found.setdefault("server_url", url_of_server() or "")
        least_s = found.get("stream_patience_s", cls.stream_patience_s)
        found.setdefault("stream_total_patience_s", max(cls.stream_total_patience_s, least_s))
        return cls(pool_prefix=prefix_of_pools(), **found)


def _check_names(names: Iterable[str]) -> None:
    """Raise ModelError for an unknown name with our prefix: Triton would ignore a misspelled parameter silently."""
    for name in names:
        if name.upper() == _GONE:
            raise ModelError(f"parameter {name} is gone: all memory has ordinary pages; remove it from config.pbtxt")
        if name.upper().startswith(PREFIX) and name not in PARAMETERS:
            close = difflib.get_close_matches(name.upper(), PARAMETERS, n=1)
            expected = f"did you mean {close[0]}?" if close else f"expected one of {', '.join(sorted(PARAMETERS))}"
            raise ModelError(f"config.pbtxt has an unknown parameter {name}; {expected}")


_Reader = Callable[[str, str], object]
"""Takes a parameter's name and its text; raises ModelError for an invalid text."""


def _server_url(name: str, text: str) -> str:
    try:
        place = urlsplit(text)
        is_url = place.scheme in ("http", "https") and place.hostname is not None and place.port != 0
    except ValueError:
        is_url = False
    if not is_url:
        raise ModelError(f"parameter {name} is {text!r}; expected http://HOST:PORT")
    return text


def _allowed_uids(name: str, text: str) -> frozenset[int] | None:
    if text.strip() == "any":
        return None
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and len(word) <= _MOST_DIGITS for word in words):
        raise ModelError(f"parameter {name} is {text!r}; expected user ids, separated by commas, or any")
    return frozenset(int(word) for word in words)


def _one_of(yes: str, no: str) -> _Reader:
    def read(name: str, text: str) -> bool:
        if text not in (yes, no):
            raise ModelError(f"parameter {name} is {text!r}; expected {yes} or {no}")
        return text == yes

    return read


def _bytes(least: int) -> _Reader:
    def read(name: str, text: str) -> int:
        if not text.strip().isdecimal() or int(text) < least:
            raise ModelError(f"parameter {name} is {text!r}; expected a number of bytes, {least} or more")
        return int(text)

    return read


def _seconds(most: float = math.inf) -> _Reader:
    def read(name: str, text: str) -> float:
        try:
            seconds = float(text)
        except ValueError:
            seconds = math.nan
        if not (0 < seconds < math.inf and seconds <= most):
            bound = f" and at most {most:g}" if most < math.inf else ""
            raise ModelError(f"parameter {name} is {text!r}; expected seconds, more than 0{bound}")
        return seconds

    return read


_SWITCH: Final = _one_of("true", "false")
_READERS: Final[Mapping[str, tuple[str, _Reader]]] = {
    UIDS_PARAMETER: ("allowed_uids", _allowed_uids),
    "SHM_DEBUG": ("debug", _SWITCH),
    "SHM_FOREIGN_REGIONS": ("foreign_regions", _one_of("registered", "off")),
    "SHM_GPU_EVENTS": ("gpu_events", _SWITCH),
    "SHM_HANDOVER_S": ("handover_s", _seconds(_LONGEST_HANDOVER_S)),
    "SHM_INLINE_BYTES": ("inline_bytes", _bytes(0)),
    "SHM_MAX_MAPPED_BYTES": ("max_mapped_bytes", _bytes(1)),
    "SHM_METRICS": ("metrics", _SWITCH),
    "SHM_PIN_HOST_MEMORY": ("pin_host_memory", _SWITCH),
    "SHM_REGISTRATIONS": ("checks_registrations", _one_of("checked", "trusted")),
    "SHM_SERVER_URL": ("server_url", _server_url),
    "SHM_STREAM_PATIENCE_S": ("stream_patience_s", _seconds()),
    "SHM_STREAM_TOTAL_PATIENCE_S": ("stream_total_patience_s", _seconds()),
}
"""For each parameter: the field of :class:`Config`, and the reader of its text."""

PARAMETERS: Final = frozenset({PATHS_PARAMETER, *_READERS})
"""All parameters that this package reads from a model's ``config.pbtxt``."""


def refused_lines(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the lines of a JSON configuration that no session can serve, each with the reason."""
    sequences = config.get("sequence_batching") or {}
    if config.get("response_cache", {}).get("enable"):
        yield (
            "response_cache { enable: true }",
            "Triton's response cache looks at input tensors only: a cached answer would not reach the client's memory",
        )
    if sequences.get("iterative_sequence"):
        yield (
            "iterative_sequence: true",
            "the server executes a request again after its memory went back to the client, and crashes if the first "
            "execution answered it; send several responses from one execute, by session.stream",
        )
    if sequences.get("state"):
        yield (
            "state [ … ]",
            "Triton's Python backend cannot return the next state, so every request would get the initial one; keep "
            "the state in model.py, by call.sequence",
        )
    for field in ("batch_input", "batch_output"):
        if config.get(field):
            yield f"{field} [ … ]", "Triton's Python backend ignores it; each call knows its own rows"
    paths = config.get("parameters", {}).get(PATHS_PARAMETER, {}).get("string_value", "")
    if config.get("model_warmup") and {word.strip() for word in paths.split(",")} == {"direct"}:
        yield (
            "model_warmup [ … ]",
            f'Triton sends warm-up requests in band, which {PATHS_PARAMETER} refuses; set it to "direct,inline", or '
            "warm up in initialize",
        )
    for tensor in config.get("output", ()):
        if tensor.get("reshape") is not None and tensor.get("data_type") == "TYPE_STRING":
            yield (
                f"a reshape of output {tensor['name']!r}",
                "strings that do not fit in the client's memory come back as bytes, which Triton would reshape",
            )


def load_warnings(spec: ModelSpec, config: Mapping[str, Any], *, stub_reads_numpy: bool) -> Iterator[str]:
    """Yield warnings for the server's log about settings that prevent shared memory, batching, and strings."""
    if spec.paths is None:
        yield (
            f"no client shares memory with model {spec.name!r}, although its model.py makes a ShmSession; add to its "
            f"config.pbtxt: {PATHS_LINE}"
        )
        obstacle = spec.obstacle_in_inputs()
        if obstacle is not None:
            yield f"clients also need this for shared memory: {obstacle}"
    ragged = {tensor["name"] for tensor in config.get("input", ()) if tensor.get("allow_ragged_batch")}
    varying = [name for name, tensor in spec.inputs.items() if -1 in tensor.shape[1:] and name not in ragged]
    if "dynamic_batching" in config and varying and spec.paths != frozenset({"direct"}):
        yield (
            f"model {spec.name!r} has inputs of varying size ({', '.join(varying)}): in band, Triton executes requests "
            "in which these sizes differ one by one; on the direct path, it batches them. If the sizes differ, add "
            "`allow_ragged_batch: true` to these inputs in its config.pbtxt"
        )
    if not stub_reads_numpy:
        strings = [name for each in (spec.inputs, spec.outputs) for name, t in each.items() if t.dtype is BYTES]
        if strings:
            yield (
                f"Triton's stub was built for NumPy 1, and model {spec.name!r} has NumPy {np.__version__}: a request "
                f"that carries strings ({', '.join(strings)}) in band ends this instance's process; requests on the "
                "direct path are not affected; install numpy<2 for the model, or use a newer Triton"
            )


_PROGRAM: Final = "tritonserver"
_ALLOW: Final = "--allow-http"
_ADDRESS: Final = "--http-address"
_PORT: Final = "--http-port"
_DEFAULT_PORT: Final = "8000"
_OFF: Final = frozenset({"false", "0"})
_LOOPBACK: Final = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}
"""By address to listen on: the address to connect to, if the server listens on all interfaces."""
_MEANS_MORE: Final = "localhost"
"""This name may resolve to an address other than the server's, where any process may listen."""
_VERTEX_AI: Final = ("AIP_MODE", "PREDICTION")
"""With this variable, a build for Vertex AI serves no HTTP without ``--allow-http`` (``command_line_parser.cc``)."""
_BACKEND: Final = "triton_python_backend_utils"
_EMULATED: Final = "__server_url__"


def url_of_server() -> str | None:
    """Return the URL of the server that started this process, from its command line; None if that does not show it."""
    emulated: str | None = getattr(sys.modules.get(_BACKEND), _EMULATED, None)
    if emulated:
        return emulated
    try:
        words = os.fsdecode(Path(f"/proc/{os.getppid()}/cmdline").read_bytes()).split("\0")
    except OSError:
        return None
    options: dict[str, str] = {}  # by name; the last value counts
    for word, following in zip(words, [*words[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        options[name] = value if equals else following
    # Do not guess: any other parent may serve no HTTP, and another program may listen on the default port.
    if PurePath(words[0]).name != _PROGRAM or any(map(_is_abbreviated, options)):
        return None
    allowed, (name, value) = options.get(_ALLOW), _VERTEX_AI
    if allowed is None and os.environ.get(name) == value:
        return None
    address = options.get(_ADDRESS, "")
    if (allowed or "").lower() in _OFF or address == _MEANS_MORE:
        return None
    host, port = _LOOPBACK.get(address, address), options.get(_PORT) or _DEFAULT_PORT
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _is_abbreviated(name: str) -> bool:
    """Return whether a word may be an abbreviation of one of these options, as getopt_long(3) allows."""
    return len(name) > 2 and any(option.startswith(name) and option != name for option in (_ALLOW, _ADDRESS, _PORT))


def auto_complete(config: Any) -> Any:
    """Prepare a model's configuration for the direct path. Call it in ``TritonPythonModel.auto_complete_config``.

    It makes the inputs optional that you added before, and adds the input ``SHM``. That input carries the batch size if
    the model has batches, and declares that the model serves every path. It replaces the parameter ``SHM_PATHS``, which
    Python code cannot add: Triton 2.51 accepts changes of inputs, outputs, ``max_batch_size``, dynamic batching and the
    transaction policy only. If ``config.pbtxt`` has ``SHM_PATHS``, that decides: a model without batches then gets no
    ``SHM``. Without ``direct`` in it, the configuration stays unchanged.

    Parameters
    ----------
    config : triton_python_backend_utils.ModelConfig
        Triton's object. It must already have ``max_batch_size`` and all inputs, from ``config.pbtxt`` or from you.

    Returns
    -------
    triton_python_backend_utils.ModelConfig
        The same object, for Triton.

    Raises
    ------
    ModelError
        ``config.pbtxt`` has an input without ``optional: true``, or another input with the name ``SHM``. The message
        says how to change it.

    Examples
    --------
    A model that needs no ``config.pbtxt``::

        @staticmethod
        def auto_complete_config(config):
            config.set_max_batch_size(16)
            config.add_input({"name": "X", "data_type": "TYPE_FP32", "dims": [3, 224, 224]})
            config.add_output({"name": "Y", "data_type": "TYPE_FP32", "dims": [3, 224, 224]})
            return auto_complete(config)
    """
    spec = ModelSpec.from_config(config.as_dict())
    if spec.paths is not None and DIRECT not in spec.paths:
        return config
    if spec.max_batch_size > 0 or spec.paths is None:
        if BATCH_CARRIER in spec.inputs:
            raise ModelError(
                f"model {spec.name!r} has input {spec.inputs[BATCH_CARRIER]}, but this name is for the input that "
                f"declares the direct path; rename your input, or write {CARRIER_LINE} in config.pbtxt"
            )
        config.add_input(dict(CARRIER))
    for tensor in config.as_dict()["input"]:
        if "optional" not in tensor:
            config.add_input({name: tensor[name] for name in ("name", "data_type", "dims")} | {"optional": True})
    obstacle = ModelSpec.from_config(config.as_dict()).obstacle_in_inputs()
    if obstacle is not None:
        raise ModelError(f"{obstacle}, or remove it there and add it in auto_complete_config")
    return config
