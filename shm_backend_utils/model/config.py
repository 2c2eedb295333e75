"""What ``config.pbtxt`` says of regions, in its ``parameters``."""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from ..errors import ModelError
from ..memory.backend_pools import USUAL_PREFIX, prefix_of_pools
from ..model_spec import PATHS_PARAMETER, UIDS_PARAMETER
from .refused_lines import refused_lines
from .server_address import url_of_server

__all__ = ["PARAMETERS", "PREFIX", "Config"]

PARAMETERS: Final = frozenset(
    {
        PATHS_PARAMETER,
        UIDS_PARAMETER,
        "SHM_DEBUG",
        "SHM_FOREIGN_REGIONS",
        "SHM_GPU_EVENTS",
        "SHM_HANDOVER_S",
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
        """Read it from a model's configuration in JSON.

        ModelError names a parameter with a name or a value that means nothing, or a line that no session can serve.
        """
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
            max_mapped_bytes=_max_mapped_bytes(texts),
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


def _max_mapped_bytes(texts: Mapping[str, str]) -> int | None:
    text = texts.get("SHM_MAX_MAPPED_BYTES")
    if text is None:
        return None
    if not text.strip().isdecimal() or not int(text):
        raise ModelError(f"parameter SHM_MAX_MAPPED_BYTES is {text!r}; expected a number of bytes, more than 0")
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
