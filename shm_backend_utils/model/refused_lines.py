"""Lines of ``config.pbtxt`` that no session can serve: they are refused at load, before a request goes wrong."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..model_spec import PATHS_PARAMETER

__all__ = ["refused_lines"]


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
