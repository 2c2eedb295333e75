"""Obstacles to the direct path in a model's configuration."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any, Final

from ...errors import ModelError
from ...model.config import PARAMETERS, PREFIX, Config, refused_lines
from ...model_spec import BATCH_CARRIER, PATHS_PARAMETER, ModelSpec, is_of_python_backend
from .checkup import Finding
from .troubles import Trouble

__all__ = ["all_are_optional", "findings_in_config", "mentions_shared_memory"]

_DIRECT: Final = "direct"


def findings_in_config(config: Mapping[str, Any], model: str) -> list[Finding]:
    """Return the obstacles to the direct path in a Python model's configuration, in the server's JSON form."""
    if not is_of_python_backend(config):
        return []
    return [*_lines(config, model), *_parameters(config, model), *_declaration(config, model)]


def mentions_shared_memory(config: Mapping[str, Any]) -> bool:
    """Return whether a configuration has anything that is written for this library: a parameter, or the input SHM."""
    return (
        any(name.upper().startswith(PREFIX) for name in config.get("parameters", {}))
        or any(tensor.get("name") == BATCH_CARRIER for tensor in config.get("input", ()))
        or bool(_misspelt_declaration(config))
    )


def all_are_optional(config: Mapping[str, Any]) -> bool:
    """Return whether all inputs of a model are optional: a session requires that, other models rarely have it."""
    inputs = config.get("input", ())
    return bool(inputs) and all(tensor.get("optional") for tensor in inputs)


def _lines(config: Mapping[str, Any], model: str) -> Iterator[Finding]:
    for line, why in refused_lines(config):
        trouble = Trouble.RESPONSE_CACHE if line.startswith("response_cache") else Trouble.REFUSED_LINE
        yield Finding(trouble, f"found {line}; {why}", model)


def _parameters(config: Mapping[str, Any], model: str) -> Iterator[Finding]:
    """Yield a finding for each wrong parameter: ``Config`` stops at the first one, so each is checked by itself."""
    for name, value in sorted(config.get("parameters", {}).items()):
        try:
            Config.from_config({"name": model, "parameters": {name: value}})
        except ModelError as error:
            trouble = Trouble.BAD_PARAMETER if name in PARAMETERS else Trouble.UNKNOWN_PARAMETER
            yield Finding(trouble, str(error), model)


def _declaration(config: Mapping[str, Any], model: str) -> Iterator[Finding]:
    named = [tensor for tensor in config.get("input", ()) if tensor.get("name")]
    config = {**config, "name": model, "input": named, "output": []}
    try:
        spec = ModelSpec.from_config(config)
    except ModelError as error:
        yield Finding(Trouble.UNKNOWN_PATH, str(error), model)
        meant = {PATHS_PARAMETER: {"string_value": _DIRECT}}  # it tries to declare paths
        spec = ModelSpec.from_config({**config, "parameters": meant})
    if spec.paths is None:
        misspelt = _misspelt_declaration(config)
        if not misspelt.startswith(PREFIX):  # else _parameters has reported the wrong name
            hint = f", but {misspelt}, which may be a misspelling of it" if misspelt else ""
            yield Finding(Trouble.NO_SHM_PATHS, f"found no parameter {PATHS_PARAMETER}{hint}", model)
    elif _DIRECT not in spec.paths:
        found = f"found {PATHS_PARAMETER} {','.join(sorted(spec.paths))!r}; expected {_DIRECT} among its words"
        yield Finding(Trouble.DIRECT_NOT_DECLARED, found, model)
        return
    required = [name for name, tensor in spec.inputs.items() if not tensor.optional]
    if spec.max_batch_size > 0 and not spec.has_batch_carrier:
        own = spec.inputs.get(BATCH_CARRIER)
        found = f"there is no input {BATCH_CARRIER}" if own is None else f"found input {own}"
        yield Finding(Trouble.NO_SHM_INPUT, f"max_batch_size is {spec.max_batch_size}, and {found}", model)
        required = [name for name in required if name != BATCH_CARRIER]
    if required:
        verb = "is" if len(required) == 1 else "are"
        yield Finding(Trouble.INPUTS_NOT_OPTIONAL, f"{', '.join(required)} {verb} not optional", model)


def _misspelt_declaration(config: Mapping[str, Any]) -> str:
    """Return the name of a parameter that looks like a misspelt SHM_PATHS; empty if SHM_PATHS is set, or none does."""
    if PATHS_PARAMETER in config.get("parameters", {}):
        return ""
    return "".join(difflib.get_close_matches(PATHS_PARAMETER, config.get("parameters", {}), n=1, cutoff=0.8))
