"""One client of the soak: sends checked requests until its standard input ends, and tells what it saw."""

from __future__ import annotations

import argparse
import faulthandler
import gc
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Final

import numpy.typing as npt

from shm_backend_utils.client import DeadlineExceededError, PreparedCall, Result, ServerUnavailableError, ShmClient
from shm_backend_utils.errors import ShmError, SlotInDoubtError

from ..machine import held_shared_memory
from .board import Board, Phase
from .tally import Tally
from .workload import WORKLOADS, HeldViews, Noise, Workload, is_right

REPORT_INTERVAL_S: Final = 0.25
CALL_TIMEOUT_S: Final = 20.0
SLEEPS_MS: Final = (0, 0, 0, 0, 1, 40)
MOST_HELD_VIEWS: Final = 4
QUARANTINE_WAIT_S: Final = 10.0


class SoakClient:
    """A loop of random deeds over one connection per protocol, which is never renewed because of an error."""

    def __init__(self, urls: dict[str, str], seed: int, board: Board) -> None:
        self._urls = urls
        self._board = board
        self._chance = random.Random(seed)
        self._noise = Noise(seed)
        self._clients: dict[str, ShmClient] = {}
        self._lost: set[str] = set()
        self._held = HeldViews(MOST_HELD_VIEWS)
        self.tally = Tally()

    def step(self) -> None:
        """Do one deed; count what went wrong with it."""
        deeds: list[Callable[[str, ShmClient], None]] = [self._infer, self._prepare, self._expire, self._reconnect]
        (deed,) = self._chance.choices(deeds, weights=[50, 40, 9, 1])
        protocol = self._chance.choice(list(self._urls))
        try:
            deed(protocol, self._client(protocol))
        except ServerUnavailableError as error:
            self.tally.add_error(error)
            self._lost.add(protocol)
            time.sleep(0.05)
        except ShmError as error:
            self.tally.add_error(error)
        except Exception as error:  # whatever it is: this package has errors of its own for everything
            self.tally.add_error(error, "foreign errors")
        self._board.phase = Phase.ELSEWHERE

    def observe(self) -> None:
        """Count what is not to grow."""
        self.tally.add("descriptors", str(len(os.listdir("/proc/self/fd"))))  # noqa: PTH208  # a count is all we need
        for client in self._clients.values():
            self.tally.add("quarantine while running", str(_quarantined(client)))

    def close(self) -> None:
        """Give everything up, and count what is still held then."""
        self.tally.add("wrong bytes", "a view that was held", self._held.drop())
        deadline = time.monotonic() + QUARANTINE_WAIT_S
        while any(map(_quarantined, self._clients.values())) and time.monotonic() < deadline:
            time.sleep(0.05)
        self.tally.add("quarantine at the end", "slots", sum(map(_quarantined, self._clients.values())))
        while self._clients:
            self._clients.popitem()[1].close()
        gc.collect()
        for leak in held_shared_memory("self"):
            self.tally.add("leaked by clients", leak)

    def _client(self, protocol: str) -> ShmClient:
        if protocol not in self._clients:
            self._clients[protocol] = ShmClient(self._urls[protocol], timeout_s=CALL_TIMEOUT_S, path="direct")
        return self._clients[protocol]

    def _infer(self, protocol: str, client: ShmClient) -> None:
        workload = self._chance.choice(list(WORKLOADS.values()))
        payload = workload.payload(self._noise)
        self._board.phase = Phase.IN_FLIGHT
        result = client.infer(
            workload.model,
            {workload.source: payload},
            outputs=self._hint(workload, payload),
            parameters=workload.parameters(self._chance.choice(SLEEPS_MS)) or {},
        )
        self._check(protocol, workload, "infer", payload, result, holdable=True)

    def _prepare(self, protocol: str, client: ShmClient) -> None:
        workload = self._chance.choice(list(WORKLOADS.values()))
        payload = workload.payload(self._noise)
        with self._prepared(client, workload, payload, self._chance.choice(SLEEPS_MS)) as call:
            for last in (*[False] * self._chance.randrange(3), True):
                payload = self._write(call, workload, payload)
                self._board.phase = Phase.IN_FLIGHT
                result = call.infer()
                self._check(protocol, workload, "prepare", payload, result, holdable=last)

    def _expire(self, protocol: str, client: ShmClient) -> None:
        """Let a deadline expire, and go on at once as if nothing was."""
        workload = WORKLOADS["halves"]
        payload = workload.payload(self._noise)
        patience_s = self._chance.uniform(0.002, 0.12)
        if self._chance.random() < 0.5:
            try:
                self._board.phase = Phase.IN_FLIGHT
                client.infer(
                    workload.model, {workload.source: payload}, parameters={"sleep_ms": 80}, timeout_s=patience_s
                ).release()
            except DeadlineExceededError as error:
                self.tally.add_error(error)
            for _ in range(self._chance.randint(1, 3)):
                self._infer(protocol, client)
        else:
            with self._prepared(client, workload, payload, 80) as call:
                self._write(call, workload, payload)
                try:
                    self._board.phase = Phase.IN_FLIGHT
                    call.infer(timeout_s=patience_s).release()
                except DeadlineExceededError as error:
                    self.tally.add_error(error)
                payload = self._write(call, workload, payload)
                result = self._infer_when_certain(call)
                self._check(protocol, workload, "prepare after a deadline", payload, result, holdable=True)

    def _reconnect(self, protocol: str, client: ShmClient) -> None:
        """Close a client while views over its memory live on."""
        client.close()
        del self._clients[protocol]

    def _infer_when_certain(self, call: PreparedCall) -> Result:
        deadline = time.monotonic() + CALL_TIMEOUT_S
        while True:
            try:
                self._board.phase = Phase.IN_FLIGHT
                return call.infer()
            except SlotInDoubtError as error:
                self.tally.add_error(error)
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.005)

    def _prepared(
        self, client: ShmClient, workload: Workload, payload: npt.NDArray[Any], sleep_ms: int
    ) -> PreparedCall:
        return client.prepare(
            workload.model,
            {workload.source: (payload.shape, payload.dtype)},
            outputs=self._hint(workload, payload),
            parameters=workload.parameters(sleep_ms) or {},
        )

    def _hint(self, workload: Workload, payload: npt.NDArray[Any]) -> dict[str, int] | None:
        """Say how large the output is, or leave it to be learned, or to overflow."""
        return {workload.sink: payload.nbytes} if self._chance.random() < 0.8 else None

    def _write(self, call: PreparedCall, workload: Workload, like: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Fill the input with a new payload of the same shape, in two halves; return the payload."""
        payload = self._noise.like(like)
        self._board.phase = Phase.WRITING
        target, source = call.inputs[workload.source].reshape(-1), payload.reshape(-1)
        middle = len(target) // 2
        target[:middle] = source[:middle]
        target[middle:] = source[middle:]
        return payload

    def _check(
        self,
        protocol: str,
        workload: Workload,
        way: str,
        payload: npt.NDArray[Any],
        result: Result,
        *,
        holdable: bool,
    ) -> None:
        self._board.phase = Phase.READING
        view = result[workload.sink]
        self.tally.add("requests", f"{workload.model}, {protocol}, {way}")
        self.tally.add("paths", f"{result.path}, overflowed" if result.overflowed else result.path)
        if is_right(view, workload.expected(payload)):
            self._board.verified += 1
        else:
            self.tally.add("wrong bytes", "a result")
        if protocol in self._lost:
            self._lost.discard(protocol)
            self.tally.add("recoveries after the server was gone", protocol)
        self.tally.add("wrong bytes", "a view that was held", self._held.pass_call())
        if holdable and self._chance.random() < 0.3:
            self._held.hold(view, self._chance.randint(1, 40))


def _quarantined(client: ShmClient) -> int:
    return client.stats().quarantined


def stop_event() -> threading.Event:
    """Return an event that is set when standard input ends: the soak wants this client to stop, or is gone."""
    event = threading.Event()

    def wait() -> None:
        os.read(sys.stdin.fileno(), 1)
        event.set()

    threading.Thread(target=wait, daemon=True).start()
    return event


def main() -> int:
    """Run the client."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--grpc", required=True)
    parser.add_argument("--http", required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--board", type=int, required=True, help="the board's inherited descriptor")
    arguments = parser.parse_args()
    faulthandler.enable()
    stop = stop_event()
    client = SoakClient({"grpc": arguments.grpc, "http": arguments.http}, arguments.seed, Board(arguments.board))
    due = time.monotonic()
    while not stop.is_set():
        client.step()
        if time.monotonic() >= due:
            client.observe()
            print(client.tally.take(), flush=True)
            due = time.monotonic() + REPORT_INTERVAL_S
    client.close()
    print(client.tally.take(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
