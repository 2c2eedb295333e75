"""What a client process does, and how often: requests at once, in the background, in place, as a stream, too late."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from shm_backend_utils.client import DeadlineExceededError, PreparedCall, Result
from shm_backend_utils.compat.attach import attach
from shm_backend_utils.compat.triton_shm_client import TritonSHMClient
from shm_backend_utils.errors import ShmError, SlotInDoubtError
from shm_backend_utils.memory.segment import SystemSegment

from .forks import forks, threads
from .kit import CALL_TIMEOUT_S, Connection, Kit, OnLoop
from .models import MOST_ROWS, Array, Request, Said, is_right
from .process import ATTACHED_PREFIX, Phase
from .signals import Signals
from .tally import WRONG

TILE: Final = 256
ATTACHED_BYTES: Final = 1 << 18


def infer(kit: Kit, connection: Connection) -> None:
    kit.infer(connection, kit.request())


def bursts(kit: Kit, connection: Connection) -> None:
    """Small requests one after another, no two alike: most of all requests, at the least cost for each."""
    path = kit.chance.choice(("direct", "direct", "auto"))
    for _ in range(kit.chance.randint(1, 200)):
        kit.infer(connection, kit.request(("identity", "halves"), 4096), path=path)


def forward(kit: Kit, connection: Connection) -> None:
    """A request of a model that has another one do the work, on the client's memory or a copy."""
    request = kit.request(("relay",))
    kit.infer(connection, replace(request, said=request.said.to_another_model(copies=kit.chance.random() < 0.3)))


def split(kit: Kit, connection: Connection) -> None:
    rows = kit.noise.rows(kit.chance.randint(MOST_ROWS + 1, 20), 2 << 20)
    request = Request("rows", rows, room=kit.room("Y", rows.nbytes))
    kit.infer(connection, request, "split", split=True)


def submit(kit: Kit, connection: Connection) -> None:
    for _ in _submitted(kit, connection, [kit.request() for _ in range(kit.chance.randint(1, 4))]):
        pass


def batches(kit: Kit, connection: Connection) -> None:
    """Requests side by side that the model serves as one batch, where the server makes one of them."""
    rows = kit.noise.rows(1, 1 << 16)
    requests = [Request("rows", kit.noise.like(rows)) for _ in range(MOST_ROWS)]
    for result in _submitted(kit, connection, requests):
        together = result["TOGETHER"]
        if together.shape != (1, 1) or not 1 <= together[0, 0] <= MOST_ROWS:
            kit.tally.add(WRONG, "the number of requests in a batch")
        elif together[0, 0] > 1:
            kit.tally.add("done", "batches")


def _submitted(kit: Kit, connection: Connection, requests: Sequence[Request]) -> Iterator[Result]:
    begun = []
    for request in requests:
        with kit.bounded("submit"):
            begun.append((request, connection.caller.submit(*request.inputs, **request.options)))
    kit.chance.shuffle(begun)
    kit.enter(Phase.IN_FLIGHT)
    while begun:
        request, future = begun.pop()
        with kit.bounded("the result of submit", 2 * CALL_TIMEOUT_S):
            result = future.result()
        kit.pass_call(kit.check(connection, request, result, "submit"))
        yield result


def prepare(kit: Kit, connection: Connection) -> None:
    request = kit.request()
    with closing(kit.prepared(connection, request)) as call:
        view = None
        for _ in range(kit.chance.randint(1, 3)):
            request = _fill(kit, call, request)
            kit.enter(Phase.IN_FLIGHT)
            with kit.bounded("the infer of prepare"):
                result = call.infer()
            view = kit.check(connection, request, result, "prepare")
            kit.pass_call()
        kit.pass_call(view)


def _fill(kit: Kit, call: PreparedCall | OnLoop, like: Request) -> Request:
    request = replace(like, payload=kit.noise.like(like.payload))
    kit.enter(Phase.WRITING)
    call.inputs[request.source][...] = request.payload
    return request


def deadlines(kit: Kit, connection: Connection) -> None:
    """Let a deadline expire, and go on at once as if nothing was."""
    request = replace(kit.request(("halves",)), said=Said({"sleep_ms": 80}))
    patience_s = kit.chance.uniform(0.002, 0.12)
    if kit.chance.random() < 0.5:
        options = {**request.options, "timeout_s": patience_s}
        _expire(kit, lambda: connection.caller.infer(*request.inputs, **options), patience_s)
        for _ in range(kit.chance.randint(1, 3)):
            infer(kit, connection)
        return
    with closing(kit.prepared(connection, request)) as call:
        _fill(kit, call, request)
        _expire(kit, lambda: call.infer(timeout_s=patience_s), patience_s)
        request = _fill(kit, call, request)
        result = _infer_when_certain(kit, call)
        kit.pass_call(kit.check(connection, request, result, "prepare after a deadline"))


def _expire(kit: Kit, call: Callable[[], Any], patience_s: float) -> None:
    kit.enter(Phase.IN_FLIGHT)
    try:
        with kit.bounded("a call with a deadline", patience_s):
            call().release()
    except DeadlineExceededError as error:
        kit.tally.add_error(error)


def _infer_when_certain(kit: Kit, call: PreparedCall | OnLoop) -> Result:
    deadline = time.monotonic() + CALL_TIMEOUT_S
    while True:
        try:
            kit.enter(Phase.IN_FLIGHT)
            with kit.bounded("the infer of prepare"):
                return call.infer()
        except SlotInDoubtError as error:
            kit.tally.add_error(error)
            if time.monotonic() > deadline:
                raise
            time.sleep(0.005)


def reconnect(kit: Kit, connection: Connection) -> None:
    """Close a client while views over its memory live on."""
    with kit.bounded("close"):
        connection.close()


def strings(kit: Kit, connection: Connection) -> None:
    letters = "abcdefghijklmnopqrstuvwxyzäöüßñéλж漢 ,.0123456789"
    lengths = [int(kit.chance.triangular(0, 300, 0)) for _ in range(kit.chance.randint(0, 200))]
    texts = ["".join(kit.chance.choices(letters, k=length)) for length in lengths]
    given = np.array([text.encode() for text in texts], object)
    expected = np.array([text.upper().encode() for text in texts], object)
    room = kit.room("UPPER", sum(4 + len(text) for text in expected))
    kit.enter(Phase.IN_FLIGHT)
    with kit.bounded("infer"):
        result = connection.caller.infer("text_upper", {"TEXT": given}, outputs=room)
    kit.enter(Phase.READING)
    kit.checked(is_right(result["UPPER"], expected), connection.kind, connection.protocol, "strings")
    if result.overflowed:
        kit.tally.add("done", "overflows")
    kit.pass_call()


def streams(kit: Kit, connection: Connection) -> None:
    image = kit.noise.photograph(700)
    tops, lefts = range(0, image.shape[0], TILE), range(0, image.shape[1], TILE)
    places = [(top, left) for top in tops for left in lefts]
    last = kit.chance.randrange(len(places)) if kit.chance.random() < 0.15 else len(places)
    frame_count = kit.chance.randint(1, 6)
    room = {"TILE": TILE * TILE * 3, "PLACE": 8} if kit.chance.random() < 0.7 else None
    held: list[Array] = []
    are_right = True
    kit.enter(Phase.STREAMING)
    stream: Any = connection.caller.stream("frames", {"IMAGE": image}, outputs=room, frames=frame_count)
    with closing(stream):
        for place in [*places, None][: last + 1]:
            with kit.bounded("the next response of a stream"):
                result = next(stream, None)
            if result is None or place is None:
                are_right &= result is place
                break
            tile, (top, left) = result["TILE"], place
            are_right &= is_right(tile, image[top : top + TILE, left : left + TILE])
            are_right &= is_right(result["PLACE"], np.array(place, np.int32))
            if result.overflowed:
                kit.tally.add("done", "overflows")
            held.append(tile)
            del held[: max(len(held) + 1 - frame_count, 0)]  # the model needs a place for the next one
            del result, tile
    held.clear()
    kit.checked(are_right, connection.kind, connection.protocol, "streams")
    kit.pass_call()


def compat(kit: Kit, connection: Connection) -> None:
    width = kit.chance.randint(1, 4096)
    declared = [("X", (width,), np.uint32)], [("Y", (width,), np.uint32)]
    with closing(TritonSHMClient(kit.urls["gRPC"])) as client:
        client.register_shm_model("rows", *declared, max_batch_size=MOST_ROWS, pool_size=kit.chance.randint(1, 3))
        for _ in range(kit.chance.randint(1, 4)):
            count = kit.chance.randint(1, 3 * MOST_ROWS)
            rows = kit.noise.like(np.empty((count, width), np.uint32))
            kit.enter(Phase.IN_FLIGHT)
            with kit.bounded("infer_shm", 3 * CALL_TIMEOUT_S):  # so many requests, one after another
                results = client.infer_shm("rows", {"X": rows}, client_timeout=CALL_TIMEOUT_S)
            kit.checked(is_right(results["Y"], np.invert(rows)), "TritonSHMClient", connection.protocol, "compat")
        client.unregister_shm_model("rows")


class PlainClientError(Exception):
    """A call of plain tritonclient failed."""


def attached(kit: Kit, connection: Connection) -> None:
    """Describe registered regions to a model, and send that with plain tritonclient."""
    try:
        with ExitStack() as at_end:
            _attached(kit, connection, at_end)
    except ShmError:
        raise
    except (InferenceServerException, OSError) as error:
        raise PlainClientError(str(error)) from error


def _attached(kit: Kit, connection: Connection, at_end: ExitStack) -> None:
    is_grpc = connection.protocol == "gRPC"
    module: Any = tritonclient.grpc if is_grpc else tritonclient.http
    timeouts = {} if is_grpc else {"connection_timeout": CALL_TIMEOUT_S, "network_timeout": CALL_TIMEOUT_S}
    client = module.InferenceServerClient(kit.urls[connection.protocol].removeprefix("http://"), **timeouts)
    at_end.callback(client.close)
    name = f"{ATTACHED_PREFIX}{os.getpid()}-{kit.chance.getrandbits(64):016x}"
    segment = SystemSegment.create(name, 2 * ATTACHED_BYTES)
    at_end.callback(segment.close)
    at_end.callback(segment.unlink)
    memory = np.frombuffer(segment.buffer(), np.uint8)
    client.register_system_shared_memory(name, f"/{name}", 2 * ATTACHED_BYTES)
    at_end.callback(client.unregister_system_shared_memory, name)
    named = {"client_timeout": CALL_TIMEOUT_S} if is_grpc else {}
    for _ in range(kit.chance.randint(1, 4)):
        parameters = Said.random(kit.chance).parameters
        request = Request("halves", kit.noise.words(ATTACHED_BYTES), Said(parameters))
        byte_size = request.payload.nbytes
        memory[:byte_size] = request.payload.view(np.uint8)
        given = module.InferInput("X", [len(request.payload)], "UINT32")
        given.set_shared_memory(name, byte_size)
        wanted = module.InferRequestedOutput("Y")
        wanted.set_shared_memory(name, ATTACHED_BYTES, ATTACHED_BYTES)
        kit.enter(Phase.IN_FLIGHT)
        with kit.bounded("infer of tritonclient"):
            client.infer("halves", **attach("halves", [given], [wanted], parameters=parameters), **named)
        found = memory[ATTACHED_BYTES:][:byte_size].view(np.uint32)
        kit.checked(is_right(found, request.expected), "tritonclient", connection.protocol, "attach")


@dataclass(frozen=True)
class Workload:
    run: Callable[[Kit, Connection], None]
    weight: float = 1.0  # how often it is done, against the others
    needs: frozenset[str] = frozenset()  # the kind of client, and the protocol
    may_be_interrupted: bool = False  # whether a signal may raise in the middle of it


OVER_GRPC: Final = frozenset({"gRPC"})
OF_THREADS: Final = frozenset({"ShmClient"})
WORKLOADS: Final = (
    Workload(infer, 40, may_be_interrupted=True),
    Workload(bursts, 12, may_be_interrupted=True),
    Workload(prepare, 20, may_be_interrupted=True),
    Workload(submit, 10, may_be_interrupted=True),
    Workload(split, 3, may_be_interrupted=True),
    Workload(batches, 4, may_be_interrupted=True),
    Workload(strings, 8, may_be_interrupted=True),
    Workload(streams, 6, OVER_GRPC, may_be_interrupted=True),
    Workload(forward, 8, may_be_interrupted=True),
    Workload(compat, 1, OVER_GRPC | OF_THREADS, may_be_interrupted=True),
    Workload(attached, 2),  # an interrupt would leave memory that is the user's to remove
    Workload(deadlines, 1.5, may_be_interrupted=True),
    Workload(reconnect, 0.5),
    Workload(threads, 1, OF_THREADS),
    Workload(forks, 0.7),
)


def choose(kit: Kit, workloads: Sequence[Workload]) -> tuple[Workload, Connection]:
    (workload,) = kit.chance.choices(workloads, [each.weight for each in workloads])
    connections = [each for each in kit.connections if workload.needs <= {each.kind, each.protocol}]
    return workload, kit.chance.choice(connections)


def do(kit: Kit, workload: Workload, connection: Connection, signals: Signals) -> None:
    chance = kit.chance
    if not workload.may_be_interrupted or chance.random() > 0.04:
        workload.run(kit, connection)
        return
    number = chance.choice((signal.SIGINT, signal.SIGUSR1))
    delay_s = math.exp(chance.uniform(math.log(1e-5), math.log(2e-2)))  # every magnitude as likely
    _ = connection.caller  # the client is there before the signal comes
    try:
        signals.raise_in(lambda: workload.run(kit, connection), number, delay_s, connection.interrupt)
    finally:
        if signals.has_raised:
            kit.tally.add("done", "signals at points")
            kit.tally.add("signals", f"{number.name}, {workload.run.__name__}")
