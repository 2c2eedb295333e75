"""Do all of a model's processes live? A server calls a model ready whose processes have died."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from ...client import server_calls
from ...client.steps import BlockingDriver
from .checkup import Checkup
from .findings import Finding
from .troubles.model import DEAD_INSTANCE, DEAD_STUB, FORWARD_FAILS, LIFE_UNKNOWN

__all__ = ["examine_processes"]

_MOST_ASKED: Final = 32
_ANSWER_S: Final = 1.5


def examine_processes(
    driver: BlockingDriver, checkup: Checkup, config: Mapping[str, Any], versions: Sequence[str]
) -> int:
    """Look at the processes of each version of a Python model; where none is seen, ask its session for signs of life.

    Return how often the model is to be probed until a living process gets the probe, 0 where none lives: the server
    gives requests that come one by one to each process in turn. An empty version is what the server takes for the
    model. Raises as ``server_calls.sign_of_life``.
    """
    codec, name, tries = driver.transport.codec, str(config["name"]), 0
    for version in versions:
        count = server_calls.instances_of(config)
        living = driver.run(server_calls.living_in(codec, checkup.until(_ANSWER_S), config, version))
        asked = min(count, _MOST_ASKED) if living is None else min(living, 1)
        signs = [
            driver.run(server_calls.sign_of_life(codec, checkup.until(_ANSWER_S), config, version))
            for _ in range(asked)
        ]
        lacking = [sign for sign in signs if sign and not server_calls.is_of_dead_process(sign)]
        if lacking:
            checkup.add_findings(Finding(FORWARD_FAILS, lacking[0], name))
        state = "processes are dead"
        if living is None:
            state = "requests, one after another, met a dead process"
            count, living = asked, asked - sum(map(server_calls.is_of_dead_process, filter(None, signs)))
            if None in signs and not driver.run(server_calls.notices_dead_models(codec, checkup.until(_ANSWER_S))):
                checkup.add_findings(Finding(LIFE_UNKNOWN, "no session answers, and no process is seen", name))
        if living < count:
            of_version = f"of version {version}: " if len(versions) > 1 else ""
            trouble = DEAD_INSTANCE if living or len(versions) > 1 else DEAD_STUB
            checkup.add_findings(Finding(trouble, f"{of_version}{count - living} of {count} {state}", name))
        tries = max(tries, count if 0 < living < count else min(living, 1))
    return tries
