"""SHM_GPU_EVENTS: the answer leaves while the model's GPU works, and the client's stream waits, but no host."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Mapping
from typing import Final

import numpy as np

from shm_backend_utils.memory.cuda.events import EventListener

from ..measuring import Amounts, name_of
from ..report import Figure, Report, require
from .client import Check, Client
from .model import ADDITIONS
from .slots import DeviceSlot

__all__ = ["CHECKS", "measure"]

COUNT: Final = 2**19
TURNS: Final = 3
TAIL: Final = 64
_WARM_UP_ROUNDS: Final = 3
_PATIENCE_S: Final = 60.0


def _stream_waits(client: Client) -> str:
    gpu, listener = client.gpu, EventListener(client.gpu.runtime)
    with client.slot("count_up_by_event", COUNT) as slot:
        handles = set()
        for turn in range(TURNS):
            numbers = np.arange(COUNT, dtype=np.float32) % 1000 + turn
            gpu.upload(slot.x, numbers)
            models, ours = _waits(client.model.counts()), _waits(gpu.counts.so_far())
            client.infer("count_up_by_event", slot)
            events = slot.events()
            require(len(events) == 1, f"the results name {len(events)} events; expected 1")
            handles.add(events[0].handle)
            listener.wait_on_streams(events)
            require(_waits(client.model.counts()) == models, "the model's host has waited for its GPU")
            require(_waits(gpu.counts.so_far()) == ours, "the client's host has waited for the event")
            result = gpu.download(slot.y)  # on the stream that waits
            require(bool((result == numbers + ADDITIONS).all()), f"the output was read too early in turn {turn}")
        require(len(handles) == 1, f"the model made {len(handles)} events for one stream")
    return f"{ADDITIONS} kernels were under way, {TURNS} times"


def _host_asks(client: Client) -> str:
    gpu, listener = client.gpu, EventListener(client.gpu.runtime)
    with client.slot("count_up_by_event", COUNT) as slot, client.slot("count_up_by_event", COUNT) as of_others:
        numbers = np.arange(COUNT, dtype=np.float32) % 1000
        for each in (slot, of_others):
            gpu.upload(each.x, numbers)
        ours = gpu.counts.so_far()["synchronize"]
        client.infer("count_up_by_event", slot)
        deadline, calls = time.monotonic() + _PATIENCE_S, 0
        with listener.watching(slot.events()) as are_done:
            while not calls or not are_done():
                require(time.monotonic() < deadline, f"the event is not done after {calls} calls of others")
                client.infer("count_up_by_event", of_others)  # records the same event anew
                calls += 1
        require(gpu.counts.so_far()["synchronize"] == ours, "the client's host has waited for the GPU")
        result = gpu.download(slot.y)  # on a stream that has not waited
        require(bool((result == numbers + ADDITIONS).all()), "the event was done before the output was written")
        listener.wait_on_streams(of_others.events())
        gpu.wait()
    return f"meanwhile others made {calls} calls"


def _host_waits_once(client: Client) -> str:
    with client.slot("count_up", COUNT) as slot:
        client.gpu.upload(slot.x, np.zeros(COUNT, np.float32))
        before = _waits(client.model.counts())
        client.infer("count_up", slot)
        waits = _waits(client.model.counts()) - before
        require(waits == 1, f"the model's host has waited {waits} times; expected once")
        require(not slot.events(), "the results name events that nobody asked for")
    return ""


CHECKS: Final[Mapping[str, Check]] = {
    "with SHM_GPU_EVENTS the client's stream waits, and no host does": _stream_waits,
    "a host that asks is told when its own call's work is done, while others' goes on": _host_asks,
    "without it the model's host waits once for a request": _host_waits_once,
}


def measure(report: Report, group: str, client: Client, amounts: Amounts) -> None:
    """Measure when the answer comes, and when the result is there, with events and without."""
    report.run(group, "the answer with SHM_GPU_EVENTS and without", lambda: _measure(report, group, client, amounts))


def _measure(report: Report, group: str, client: Client, amounts: Amounts) -> str:
    count = amounts.large_bytes // 4
    listener = EventListener(client.gpu.runtime)
    answers: dict[str, list[float]] = {"count_up": [], "count_up_by_event": []}
    results: dict[str, list[float]] = {"count_up": [], "count_up_by_event": []}
    with client.slot("count_up", count) as plain, client.slot("count_up_by_event", count) as by_event:
        for round_number in range(-min(_WARM_UP_ROUNDS, amounts.slow_rounds), amounts.slow_rounds):
            for model, slot in (("count_up", plain), ("count_up_by_event", by_event)):
                answer, result = _seconds(client, model, slot, listener, round_number)
                if round_number >= 0:
                    answers[model].append(answer)
                    results[model].append(result)
    name = f"{ADDITIONS} kernels on {name_of(amounts.large_bytes)} with SHM_GPU_EVENTS"
    return report.measured(
        _ratio(group, f"{name}: result on the client's stream", results),
        _ratio(group, f"{name}: answer", answers),
    )


def _seconds(client: Client, model: str, slot: DeviceSlot, listener: EventListener, number: int) -> tuple[float, float]:
    """Return when the answer was there, and when the client had read the end of the result."""
    client.gpu.upload(slot.x[-TAIL:], np.full(TAIL, number, np.float32))
    begin = time.perf_counter()
    client.infer(model, slot)
    answer = time.perf_counter() - begin
    listener.wait_on_streams(slot.events())
    tail = client.gpu.download(slot.y[-TAIL:])  # on the stream that waits
    result = time.perf_counter() - begin
    require(bool((tail == number + ADDITIONS).all()), f"the output of {model} was read too early")
    return answer, result


def _ratio(group: str, name: str, seconds: Mapping[str, list[float]]) -> Figure:
    plain, by_event = (statistics.median(seconds[model]) * 1e3 for model in ("count_up", "count_up_by_event"))
    return Figure(name, by_event / plain, "× without", f"{by_event:.4f} ms / {plain:.4f} ms", group=group)


def _waits(counts: Counter[str]) -> int:
    """Return how often a host has waited for its GPU, or asked whether an event is done: so it waits for one."""
    return counts["synchronize"] + counts["is_event_done"]
