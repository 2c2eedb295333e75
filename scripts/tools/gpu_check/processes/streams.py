"""Checks that work on streams is in order: streams that are named, none that is named, and events of the client's."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import Counter
from collections.abc import Mapping
from typing import Final

import numpy as np

from shm_backend_utils.gpu.ordering import Mark

from ..gpu import WAITS
from ..kernels import LATE_STEPS
from ..report import Amounts, Figure, Report, name_of, require
from .client import Check, Client
from .slots import DeviceSlot

COUNT: Final = 2**19
TURNS: Final = 3
TAIL: Final = 64
_WARM_UP_ROUNDS: Final = 3
_PATIENCE_S: Final = 60.0
_PAUSE_S: Final = 0.02  # what others have a GPU do is not to grow without end


def _named(client: Client) -> str:
    waits = _late_outputs(client, "late")
    require(not waits["synchronize_device"], "the model waited for its whole GPU, though it had named the stream")
    require(waits.total() == TURNS, f"the model's host has waited {waits.total()} times for {TURNS} requests")
    return ""


def _not_named(client: Client) -> str:
    waits = _late_outputs(client, "late_unnamed")
    require(waits["synchronize_device"] >= TURNS, "the model did not wait for its GPU, and had named no stream")
    return ""


def _late_outputs(client: Client, model: str) -> Counter[str]:
    """Check what is late in the model, and return how its host has waited."""
    gpu = client.gpu
    with client.slot(model, COUNT) as slot:
        before = client.model.counts()
        for turn in range(TURNS):
            numbers = np.arange(COUNT, dtype=np.float32) % 1000 + turn
            gpu.upload(slot.x, numbers)
            client.infer(model, slot)
            require(not slot.events(), "the results name events that nobody asked for")
            expected = gpu.kernels.after_late(numbers)
            client.check_output(slot, expected, f"the output was sent too early in turn {turn}")
        after = client.model.counts()
    return Counter({name: after[name] - before[name] for name in WAITS})


def _stream_of_another_gpu(client: Client) -> str:
    with client.slot("names_foreign", COUNT) as slot:
        if client.gpu.runtime.device_count() == 1:
            client.infer("names_foreign", slot)
            return "there is one GPU, and so no such stream"
        reason = client.refusal("names_foreign", slot)
        require("[INTERNAL]" in reason or "shm:model" in reason, f"it is no error of the model's: {reason}")
    return reason


def _stream_waits(client: Client) -> str:
    gpu = client.gpu
    with client.slot("late_by_event", COUNT) as slot:
        for turn in range(TURNS):
            numbers = np.arange(COUNT, dtype=np.float32) % 1000 + turn
            gpu.upload(slot.x, numbers)
            models, ours = _waits(client.model.counts()), _waits(gpu.counts.so_far())
            client.infer("late_by_event", slot)
            require(slot.events() == (1,), f"the results name events of regions {slot.events()}; expected (1,)")
            _let_wait(client, slot)
            require(_waits(client.model.counts()) == models, "the model's host has waited for its GPU")
            require(_waits(gpu.counts.so_far()) == ours, "the client's host has waited for the event")
            result = gpu.download(slot.y)  # on the stream that waits
            expected = gpu.kernels.after_late(numbers)
            require(bool((result == expected).all()), f"the output was read too early in turn {turn}")
    return f"{LATE_STEPS} kernels were under way, {TURNS} times"


def _host_asks(client: Client) -> str:
    gpu, numbers = client.gpu, np.arange(COUNT, dtype=np.float32) % 1000
    with client.slot("late_by_event", COUNT) as slot, client.slot("late_by_event", TAIL) as of_others:
        gpu.upload(slot.x, numbers)
        gpu.upload(of_others.x, numbers[:TAIL])
        client.infer("late_by_event", slot)
        _let_wait(client, slot)
        deadline, calls = time.monotonic() + _PATIENCE_S, 0
        with contextlib.closing(Mark(gpu.runtime, gpu.stream, 0)) as mark:
            while not calls or not mark.is_done():
                require(time.monotonic() < deadline, f"the event is not done after {calls} calls of others")
                client.infer("late_by_event", of_others)
                calls += 1
                time.sleep(_PAUSE_S)
        expected = gpu.kernels.after_late(numbers)
        client.check_output(slot, expected, "the event was done before the output was written")
        _let_wait(client, of_others)
        gpu.runtime.synchronize_stream(gpu.stream, 0)
    return f"meanwhile others made {calls} calls"


def _let_wait(client: Client, slot: DeviceSlot) -> None:
    """Let the check's stream wait for the slot's event."""
    with client.gpu.runtime.on(0):
        client.gpu.runtime.wait_for_event(slot.allocation.event, client.gpu.stream)


CHECKS: Final[Mapping[str, Check]] = {
    "a stream that the model has named is waited for, once, and nothing else is": _named,
    "without a name the whole GPU is waited for": _not_named,
    "a stream of a GPU that the call does not use is refused": _stream_of_another_gpu,
    "with SHM_GPU_EVENTS the client's stream waits for the client's event, and no host does": _stream_waits,
    "a host that asks is told when its own call's work is done, while others' goes on": _host_asks,
}


def measure(report: Report, group: str, client: Client, amounts: Amounts) -> str:
    """Measure when the answer comes, and when the result is there, with events and without."""
    count = amounts.large_bytes // 4
    answers: dict[str, list[float]] = {"late": [], "late_by_event": []}
    results: dict[str, list[float]] = {"late": [], "late_by_event": []}
    with client.slot("late", count) as plain, client.slot("late_by_event", count) as by_event:
        for round_number in range(-min(_WARM_UP_ROUNDS, amounts.slow_rounds), amounts.slow_rounds):
            for model, slot in (("late", plain), ("late_by_event", by_event)):
                answer, result = _seconds(client, model, slot, round_number)
                if round_number >= 0:
                    answers[model].append(answer)
                    results[model].append(result)
    name = f"{LATE_STEPS} kernels on {name_of(amounts.large_bytes)} with SHM_GPU_EVENTS"
    return report.measured(
        _ratio(group, f"{name}: result on the client's stream", results),
        _ratio(group, f"{name}: answer", answers),
    )


def _seconds(client: Client, model: str, slot: DeviceSlot, number: int) -> tuple[float, float]:
    """Return when the answer was there, and when the client had read the end of the result."""
    tail = np.full(TAIL, number, np.float32)
    client.gpu.upload(slot.x[-TAIL:], tail)
    begin = time.perf_counter()
    client.infer(model, slot)
    answer = time.perf_counter() - begin
    if slot.events():
        _let_wait(client, slot)
    found = client.gpu.download(slot.y[-TAIL:])  # on the stream that waits
    result = time.perf_counter() - begin
    expected = client.gpu.kernels.after_late(tail)
    require(bool((found == expected).all()), f"the output of {model} was read too early")
    return answer, result


def _ratio(group: str, name: str, seconds: Mapping[str, list[float]]) -> Figure:
    plain, by_event = (statistics.median(seconds[model]) * 1e3 for model in ("late", "late_by_event"))
    return Figure(name, by_event / plain, "× without", f"{by_event:.4f} ms / {plain:.4f} ms", group=group)


def _waits(counts: Counter[str]) -> int:
    """Return how often a host has waited for its GPU."""
    return sum(counts[name] for name in WAITS)
