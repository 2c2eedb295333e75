"""Are all of a model's processes alive? The server calls a model ready whose processes have died, and asks them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


def examine_instances(
    driver: BlockingDriver, checkup: Checkup, spec: ModelSpec, config: Mapping[str, Any], versions: Sequence[str]
) -> int:
    """Ask each version of a model for as many signs of life as it has processes.

    The server gives requests that come one by one to each process in turn. A single process needs no such question:
    the probe finds out. Raises as :func:`.server_calls.is_alive`.

    Parameters
    ----------
    driver, checkup, spec, config
        As of :func:`.examine_model`.
    versions : sequence of str
        Those that are ready; an empty one is what the server takes for the model.

    Returns
    -------
    int
        How often the model is to be probed until a living process gets the probe.
    """
    asked = min(instances_of(config), _MOST_ASKED)
    if asked == len(versions) == 1:
        return 1
    codec = driver.transport.codec
    dead = {
        version: sum(
            not driver.run(server_calls.is_alive(codec, checkup.until(_ANSWER_S), spec, version)) for _ in range(asked)
        )
        for version in versions
    }
    if not 0 < sum(dead.values()) < asked * len(versions):
        return 1
    for version, count in dead.items():
        if count:
            which = f" to version {version}" if len(versions) > 1 else ""
            found = f"{count} of {asked} requests{which}, one after another, met a dead process"
            checkup.add_findings(Finding(DEAD_INSTANCE, found, spec.name))
    return asked
