"""The ways to make a request: at once, in the background, in place, in parts, as a stream, registered, too late."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack, closing
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from shm_backend_utils.client import DeadlineExceededError, PreparedCall, Result, ServerUnavailableError
from shm_backend_utils.client.options import PathName
from shm_backend_utils.compat.attach import attach
from shm_backend_utils.compat.triton_shm_client import TritonSHMClient
from shm_backend_utils.errors import SlotInDoubtError
from shm_backend_utils.memory.segment import SystemSegment

from ..kit import CALL_TIMEOUT_S, Connection, Kit, OnLoopCall
from ..models import MODELS, MOST_ROWS, Model, Said, is_right
from ..process import Phase

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

MOST_STRINGS: Final = 200
LONGEST: Final = 300
ALPHABET: Final = "abcdefghijklmnopqrstuvwxyzäöüßñéλж漢 ,.0123456789"
LENGTH_SIZE: Final = 4

LONGEST_SIDE: Final = 700
TILE: Final = 256
SHARE_LEFT_EARLY: Final = 0.15

ATTACHED_PREFIX: Final = "soak-attached-"
ATTACHED_BYTES: Final = 1 << 18
MOST_CALLS: Final = 4


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


def strings(kit: Kit, connection: Connection) -> None:
    """Have texts put into capitals."""
    texts = [
        "".join(kit.chance.choices(ALPHABET, k=int(kit.chance.triangular(0, LONGEST, 0))))
        for _ in range(kit.chance.randint(0, MOST_STRINGS))
    ]
    given = np.array([text.encode() for text in texts], object)
    expected = np.array([text.upper().encode() for text in texts], object)
    byte_size = sum(LENGTH_SIZE + len(text) for text in expected)
    kit.board.phase = Phase.IN_FLIGHT
    with kit.bounded("infer"):
        result = connection.caller.infer("text_upper", {"TEXT": given}, outputs=kit.room("UPPER", byte_size))
    kit.board.phase = Phase.READING
    if kit.is_checked(connection, "infer", is_right(result["UPPER"], expected)):
        kit.tally.add("done", "strings")
    if result.overflowed:
        kit.tally.add("done", "overflows")
    kit.pass_call()


def streams(kit: Kit, connection: Connection) -> None:
    """Get a photograph in tiles."""
    image = kit.noise.photograph(LONGEST_SIDE)
    tops, lefts = range(0, image.shape[0], TILE), range(0, image.shape[1], TILE)
    places = [(top, left) for top in tops for left in lefts]
    last = kit.chance.randrange(len(places)) if kit.chance.random() < SHARE_LEFT_EARLY else len(places)
    frame_count = kit.chance.randint(1, 6)
    room = {"TILE": TILE * TILE * 3, "PLACE": 8} if kit.chance.random() < 0.7 else None
    held: list[npt.NDArray[Any]] = []
    kit.board.phase = Phase.STREAMING
    stream = connection.caller.stream("frames", {"IMAGE": image}, outputs=room, frames=frame_count)
    are_right, count = True, 0
    with closing(stream):  # type: ignore[type-var]  # it is a generator
        for number in range(last + 1):
            with kit.bounded("the next response of a stream"):
                result = next(stream, None)
            if result is None:
                break
            count += 1
            tile = result["TILE"]
            are_right &= number < len(places) and _is_tile(image, places[number], tile, result["PLACE"])
            if result.overflowed:
                kit.tally.add("done", "overflows")
            held.append(tile)
            del held[: max(len(held) + 1 - frame_count, 0)]  # the model needs a place for the next one
            del result, tile
    are_right &= count == min(last + 1, len(places))
    held.clear()
    if kit.is_checked(connection, "stream", are_right):
        kit.tally.add("done", "streams")
        kit.tally.add("responses of streams", "right", count)
    kit.pass_call()


def _is_tile(image: npt.NDArray[Any], place: tuple[int, int], tile: npt.NDArray[Any], said: npt.NDArray[Any]) -> bool:
    top, left = place
    expected = np.ascontiguousarray(image[top : top + TILE, left : left + TILE])
    return is_right(tile, expected) and is_right(said, np.array(place, np.int32))


class PlainClientError(Exception):
    """A call of plain tritonclient failed."""


def compat(kit: Kit, connection: Connection) -> None:
    """Register a model at a TritonSHMClient, and infer more rows than it takes at once."""
    width = kit.chance.randint(1, 4096)
    declared = [("X", (width,), np.uint32)], [("Y", (width,), np.uint32)]
    with closing(TritonSHMClient(kit.urls["grpc"])) as client:
        client.register_shm_model("rows", *declared, max_batch_size=MOST_ROWS, pool_size=kit.chance.randint(1, 3))
        for _ in range(kit.chance.randint(1, MOST_CALLS)):
            count = kit.chance.randint(1, 3 * MOST_ROWS)
            rows = kit.noise.like(np.empty((count, width), np.uint32))
            kit.board.phase = Phase.IN_FLIGHT
            with kit.bounded("infer_shm", 3 * CALL_TIMEOUT_S):  # so many requests, one after another
                results = client.infer_shm("rows", {"X": rows}, client_timeout=CALL_TIMEOUT_S)
            found = is_right(results["Y"], np.invert(rows))
            kit.checked(f"TritonSHMClient, {connection.protocol}, infer_shm", found)
            if found:
                kit.tally.add("done", "compat")
        client.unregister_shm_model("rows")


def attached(kit: Kit, connection: Connection) -> None:
    """Describe registered regions to a model, and send that with plain tritonclient."""
    module: Any = tritonclient.grpc if connection.protocol == "gRPC" else tritonclient.http
    address = kit.urls["grpc"] if connection.protocol == "gRPC" else kit.urls["http"].removeprefix("http://")
    try:
        with ExitStack() as at_end:
            _attached(kit, connection, module, at_end.enter_context(closing(_client(module, address))), at_end)
    except ServerUnavailableError:
        raise
    except (InferenceServerException, OSError) as error:
        raise PlainClientError(str(error)) from error


def _client(module: Any, address: str) -> Any:
    if module is tritonclient.grpc:
        return module.InferenceServerClient(address)
    return module.InferenceServerClient(address, connection_timeout=CALL_TIMEOUT_S, network_timeout=CALL_TIMEOUT_S)


def _attached(kit: Kit, connection: Connection, module: Any, client: Any, at_end: ExitStack) -> None:
    model = MODELS["halves"]
    name = f"{ATTACHED_PREFIX}{os.getpid()}-{kit.chance.getrandbits(64):016x}"
    segment = SystemSegment.create(name, 2 * ATTACHED_BYTES)
    at_end.callback(segment.close)
    at_end.callback(segment.unlink)
    memory = np.frombuffer(segment.buffer(), np.uint8)
    client.register_system_shared_memory(name, f"/{name}", 2 * ATTACHED_BYTES)
    at_end.callback(client.unregister_system_shared_memory, name)
    named: dict[str, Any] = {"client_timeout": CALL_TIMEOUT_S} if module is tritonclient.grpc else {}
    for _ in range(kit.chance.randint(1, MOST_CALLS)):
        payload, said = kit.noise.words(most=ATTACHED_BYTES), Said.random(kit.chance)
        memory[: payload.nbytes] = payload.view(np.uint8)
        given = module.InferInput(model.source, [len(payload)], "UINT32")
        given.set_shared_memory(name, payload.nbytes)
        wanted = module.InferRequestedOutput(model.sink)
        wanted.set_shared_memory(name, ATTACHED_BYTES, ATTACHED_BYTES)
        request = attach(model.name, [given], [wanted], parameters=said.parameters)
        kit.board.phase = Phase.IN_FLIGHT
        with kit.bounded("infer of tritonclient"):
            client.infer(model.name, **request, **named)
        found = memory[ATTACHED_BYTES:][: payload.nbytes].view(np.uint32)
        expected = model.expected(payload, Said(said.parameters))
        kit.checked(f"tritonclient, {connection.protocol}, attach", is_right(found, expected))
        kit.tally.add("done", "attach")
        if said.has_parameters:
            kit.tally.add("done", "parameters")
