"""Are all of a model's processes alive? The server calls a model ready whose processes have died, and asks them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ...client import server_calls
from ...client.steps import BlockingDriver
from ...model_spec import ModelSpec
from .checkup import Checkup
from .findings import Finding
from .troubles.model import DEAD_INSTANCE

__all__ = ["examine_instances", "instances_of"]

_MOST_ASKED: Final = 32
_ANSWER_S: Final = 1.5


def instances_of(config: Mapping[str, Any]) -> int:
    """Return how many processes a model has, as its configuration tells: at least one."""
    groups = config.get("instance_group", ())
    return max(sum(int(group.get("count") or 1) * max(len(group.get("gpus") or ()), 1) for group in groups), 1)


def examine_instances(driver: BlockingDriver, checkup: Checkup, spec: ModelSpec, config: Mapping[str, Any]) -> bool:
    """Ask a model for as many signs of life as it has processes; return whether some came, and some did not.

    The server gives requests that come one by one to each process in turn. One process needs no such question: the
    probe finds out. Raises as :func:`.server_calls.is_alive`.
    """
    asked = min(instances_of(config), _MOST_ASKED)
    if asked == 1:
        return False
    codec = driver.transport.codec
    dead = sum(not driver.run(server_calls.is_alive(codec, checkup.until(_ANSWER_S), spec, "")) for _ in range(asked))
    if not 0 < dead < asked:
        return False
    checkup.bad(Finding(DEAD_INSTANCE, f"{dead} of {asked} requests, one after another, met a dead process", spec.name))
    return True
