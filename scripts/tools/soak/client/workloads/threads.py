"""Threads that share one client while the interpreter switches between them at every chance that it has."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy.typing as npt

from shm_backend_utils.client import Result

from ..board import Phase
from ..connections import Connection
from ..kit import Kit
from ..models import MODELS, Model, Said

__all__ = ["threads"]

THREADS: Final = 4
CALLS: Final = 5
USUAL_SWITCH_S: Final = 5e-3
TINY_SWITCH_S: Final = 1e-6


def threads(kit: Kit, connection: Connection) -> None:
    """Have each thread make calls of its own, some of them submitted and some prepared."""
    kit.board.phase = Phase.IN_FLIGHT
    work = [[_plan(kit) for _ in range(CALLS)] for _ in range(THREADS)]
    sys.setswitchinterval(TINY_SWITCH_S)
    try:
        with ThreadPoolExecutor(THREADS) as executor:
            futures = [executor.submit(_calls, connection.caller, plans) for plans in work]
            answers = [answer for future in futures for answer in future.result()]
    finally:
        sys.setswitchinterval(USUAL_SWITCH_S)
    for (way, model, payload, said), result in answers:
        kit.check(connection, model, payload, said, result, way)
        kit.tally.add("done", "tiny switch intervals")


Plan = tuple[str, Model, npt.NDArray[Any], Said]


def _plan(kit: Kit) -> Plan:
    model = MODELS[kit.chance.choice(("identity", "halves"))]
    return (
        kit.chance.choice(("infer", "submit")),
        model,
        kit.noise.words(most=1 << 16).view(_dtype(model)),
        kit.said(model),
    )


def _dtype(model: Model) -> str:
    return "float32" if model.name == "identity" else "uint32"


def _calls(caller: Any, plans: list[Plan]) -> list[tuple[Plan, Result]]:
    answers = []
    for plan in plans:
        way, model, payload, said = plan
        named = {"outputs": {model.sink: payload.nbytes}, **said.options()}
        if way == "submit":
            answers.append((plan, caller.submit(model.name, {model.source: payload}, **named).result()))
        else:
            answers.append((plan, caller.infer(model.name, {model.source: payload}, **named)))
    return answers
