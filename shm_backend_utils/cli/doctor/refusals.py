"""What a model has said in place of a report, and what that means."""

from __future__ import annotations

import re
from typing import Final

from ...client.paths.choice import ProbeAnswer
from ...client.server_calls import is_of_dead_process
from ...client.transports.this_machine import is_this_machine
from ...errors import MachineError, RegionGoneError, VersionError
from ...protocol.refusals import NOT_OPENED
from .findings import Finding, Trouble
from .troubles.model import DEAD_STUB, MODEL_BUSY, NO_SESSION, OTHER_NAMESPACE, OTHER_PROTOCOL, OTHER_USER, REFUSED
from .troubles.server import OTHER_MACHINE

__all__ = ["finding_of_refusal"]

_LONGEST: Final = 300
_OF_SCHEDULER: Final = re.compile(r"^(\[.*?\] )?(Exceeds maximum queue size|Request timeout expired)")
_OF_ANOTHER_USER: Final = re.compile(r"(?i)belongs to user|permission denied|SHM_ALLOWED_UIDS|its mode")


def finding_of_refusal(
    sealed: ProbeAnswer | MachineError, system: ProbeAnswer | MachineError | None, host: str, model: str
) -> Finding:
    """Return the finding for a model that has written no report with either kind of memory.

    A kind's report is None, or this process has no such memory; ``system`` is None if it was not tried. The host is the
    server's, as in the URL.
    """
    answers = [each for each in (sealed, system) if isinstance(each, ProbeAnswer)]
    if not answers:
        return Finding(REFUSED, f"this process has no memory to share: {system or sealed}", model)
    last = answers[-1]
    found = " ".join(last.refusal.split())[:_LONGEST]
    if is_of_dead_process(last.refusal) or _OF_SCHEDULER.search(last.refusal):
        return Finding(DEAD_STUB if is_of_dead_process(last.refusal) else MODEL_BUSY, found, model)
    if last.code == VersionError.code:
        return Finding(OTHER_PROTOCOL, found, model)
    if last.code in NOT_OPENED:
        said = [each.refusal for each in answers]
        return Finding(_trouble_of_memory(last.code, said, host), found, model)
    if last.code:
        return Finding(REFUSED, found, model)
    return Finding(NO_SESSION, f"it has taken the probe for a request: {found or 'and answered it'}", model)


def _trouble_of_memory(code: str, said: list[str], host: str) -> Trouble:
    """Return why a model opens no memory of this process, by what it said of each kind."""
    if any(map(_OF_ANOTHER_USER.search, said)):
        return OTHER_USER
    if not is_this_machine(host):
        return OTHER_MACHINE
    return OTHER_NAMESPACE if code == RegionGoneError.code else REFUSED
