"""The ways to make a request: at once, in the background, in place, in parts, together with others, and too late."""

from __future__ import annotations

import time
from contextlib import closing
from typing import Any, Final

import numpy.typing as npt

from shm_backend_utils.client import DeadlineExceededError, PreparedCall, Result
from shm_backend_utils.client.options import PathName
from shm_backend_utils.errors import SlotInDoubtError

from ..board import Phase
from ..connections import Connection, OnLoopCall
from ..kit import CALL_TIMEOUT_S, Kit
from ..models import MODELS, MOST_ROWS, Model, Said

__all__ = ["batches", "bursts", "deadlines", "forward", "infer", "prepare", "reconnect", "split", "submit"]

CALLED: Final = [MODELS[name] for name in ("identity", "multiply", "halves", "rows")]
SMALL: Final = [MODELS[name] for name in ("identity", "halves")]
SMALL_BYTES: Final = 4096
PATHS_OF_SMALL: Final[tuple[PathName, ...]] = ("direct", "direct", "auto")
LONGEST_BURST: Final = 200
MOST_SUBMITTED: Final = 4
MOST_SPLIT_ROWS: Final = 20
SPLIT_BYTES: Final = 2 << 20
SLEEP_MS: Final = 80


Prepared = PreparedCall | OnLoopCall


def infer(kit: Kit, connection: Connection) -> None:
    """One request of one of several models."""
    model = kit.chance.choice(CALLED)
    _infer(kit, connection, model, kit.said(model), model.payload(kit.noise))


def bursts(kit: Kit, connection: Connection) -> None:
    """Small requests one after another, no two alike: most of all requests, at the least cost for each.

    Some clients take the path that is the fastest for each: in band, where that is it.
    """
    path = kit.chance.choice(PATHS_OF_SMALL)
    for _ in range(kit.chance.randint(1, LONGEST_BURST)):
        model = kit.chance.choice(SMALL)
        said = Said.random(kit.chance) if model.reads_parameters else Said()
        _infer(kit, connection, model, said, model.payload(kit.noise, SMALL_BYTES), path)


def forward(kit: Kit, connection: Connection) -> None:
    """A request of a model that has another one do the work, on the client's memory or a copy."""
    model = MODELS["relay"]
    said = kit.said(model).without_floats()
    if kit.chance.random() < 0.3:
        said = Said({**said.parameters, "copies": True}, said.headers)
    _infer(kit, connection, model, said, model.payload(kit.noise))


def submit(kit: Kit, connection: Connection) -> None:
    """Some requests at once, whose answers are asked for in another order."""
    begun = []
    for _ in range(kit.chance.randint(1, MOST_SUBMITTED)):
        model = kit.chance.choice(CALLED)
        payload, said = model.payload(kit.noise), kit.said(model)
        with kit.bounded("submit"):
            future = connection.caller.submit(
                model.name,
                {model.source: payload},
                outputs=kit.room(model.sink, payload.nbytes),
                **said.options(),
            )
        begun.append((future, model, payload, said))
    kit.chance.shuffle(begun)
    kit.board.phase = Phase.IN_FLIGHT
    while begun:
        future, model, payload, said = begun.pop()
        with kit.bounded("the result of submit", 2 * CALL_TIMEOUT_S):
            result = future.result()
        kit.pass_call(kit.check(connection, model, payload, said, result, "submit"))


def prepare(kit: Kit, connection: Connection) -> None:
    """A call that is filled in place and sent several times."""
    model = kit.chance.choice(CALLED)
    payload, said = model.payload(kit.noise), kit.said(model)
    with closing(_prepared(kit, connection, model, payload, said)) as call:
        view = None
        for _ in range(kit.chance.randint(1, 3)):
            payload = _fill(kit, call, model, payload)
            kit.board.phase = Phase.IN_FLIGHT
            with kit.bounded("the infer of prepare"):
                result = call.infer()
            view = kit.check(connection, model, payload, said, result, "prepare")
            kit.pass_call()
        kit.pass_call(view)


def split(kit: Kit, connection: Connection) -> None:
    """A batch that is larger than the model takes at once."""
    payload = kit.noise.rows(kit.chance.randint(MOST_ROWS + 1, MOST_SPLIT_ROWS), SPLIT_BYTES)
    kit.board.phase = Phase.IN_FLIGHT
    with kit.bounded("split"):
        result = connection.caller.infer("rows", {"X": payload}, outputs=kit.room("Y", payload.nbytes), split=True)
    kit.pass_call(kit.check(connection, MODELS["rows"], payload, Said(), result, "split"))


def batches(kit: Kit, connection: Connection) -> None:
    """Requests side by side that the model serves as one batch, where the server makes one of them."""
    model, like, futures = MODELS["rows"], kit.noise.rows(1, 1 << 16), []
    for _ in range(MOST_ROWS):
        payload = kit.noise.like(like)
        with kit.bounded("submit"):
            futures.append((payload, connection.caller.submit(model.name, {"X": payload})))
    kit.board.phase = Phase.IN_FLIGHT
    for payload, future in futures:
        with kit.bounded("the result of submit", 2 * CALL_TIMEOUT_S):
            result = future.result()
        kit.pass_call(kit.check(connection, model, payload, Said(), result, "submit"))
        together = result["TOGETHER"]
        if together.shape != (1, 1) or not 1 <= together[0, 0] <= MOST_ROWS:
            kit.tally.add("wrong bytes", "the number of requests in a batch")
        elif together[0, 0] > 1:
            kit.tally.add("done", "batches")


def deadlines(kit: Kit, connection: Connection) -> None:
    """Let a deadline expire, and go on at once as if nothing was."""
    model, patience_s = MODELS["halves"], kit.chance.uniform(0.002, 0.12)
    payload, late = model.payload(kit.noise), Said({"sleep_ms": SLEEP_MS})
    if kit.chance.random() < 0.5:
        _expire(
            kit,
            lambda: connection.caller.infer(
                model.name, {model.source: payload}, timeout_s=patience_s, **late.options()
            ),
            patience_s,
        )
        for _ in range(kit.chance.randint(1, 3)):
            infer(kit, connection)
        return
    with closing(_prepared(kit, connection, model, payload, late)) as call:
        _fill(kit, call, model, payload)
        _expire(kit, lambda: call.infer(timeout_s=patience_s), patience_s)
        payload = _fill(kit, call, model, payload)
        result = _infer_when_certain(kit, call)
        kit.pass_call(kit.check(connection, model, payload, late, result, "prepare after a deadline"))


def reconnect(kit: Kit, connection: Connection) -> None:
    """Close a client while views over its memory live on."""
    with kit.bounded("close"):
        connection.close()


def _infer(
    kit: Kit,
    connection: Connection,
    model: Model,
    said: Said,
    payload: npt.NDArray[Any],
    path: PathName = "direct",
) -> None:
    kit.board.phase = Phase.IN_FLIGHT
    with kit.bounded("infer"):
        result = connection.caller.infer(
            model.name,
            {model.source: payload},
            outputs=kit.room(model.sink, payload.nbytes),
            path=path,
            **said.options(),
        )
    kit.pass_call(kit.check(connection, model, payload, said, result, "infer"))


def _prepared(kit: Kit, connection: Connection, model: Model, like: npt.NDArray[Any], said: Said) -> Prepared:
    with kit.bounded("prepare"):
        return connection.caller.prepare(
            model.name,
            {model.source: (like.shape, like.dtype)},
            outputs=kit.room(model.sink, like.nbytes),
            **said.options(),
        )


def _fill(kit: Kit, call: Prepared, model: Model, like: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Fill the input with a new payload of the same shape, in two halves; return the payload."""
    payload = kit.noise.like(like)
    kit.board.phase = Phase.WRITING
    target, source = call.inputs[model.source].reshape(-1), payload.reshape(-1)
    middle = len(target) // 2
    target[:middle] = source[:middle]
    target[middle:] = source[middle:]
    return payload


def _expire(kit: Kit, call: Any, patience_s: float) -> None:
    kit.board.phase = Phase.IN_FLIGHT
    try:
        with kit.bounded("a call with a deadline", patience_s):
            call().release()
    except DeadlineExceededError as error:
        kit.tally.add_error(error)


def _infer_when_certain(kit: Kit, call: Prepared) -> Result:
    deadline = time.monotonic() + CALL_TIMEOUT_S
    while True:
        try:
            kit.board.phase = Phase.IN_FLIGHT
            with kit.bounded("the infer of prepare"):
                return call.infer()
        except SlotInDoubtError as error:
            kit.tally.add_error(error)
            if time.monotonic() > deadline:
                raise
            time.sleep(0.005)
