"""Checks that work on streams is in order: streams that are named, none that is named, and words in host memory."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt

from shm_backend_utils.gpu.ordering import Mark, OwnStreams

from ...figures import in_words
from ..gpu import WAITS
from ..kernels import LATE_STEPS
from ..report import Amounts, Figure, in_turns, ratio, require
from .client import Check, Client
from .slots import DeviceSlot

COUNT: Final = 2**19
TURNS: Final = 3
TAIL: Final = 64
_PATIENCE_S: Final = 60.0
_PAUSE_S: Final = 0.02  # what others have a GPU do is not to grow without end


def _named(client: Client) -> None:
    waits = _late_outputs(client, "late")
    require(not waits["synchronize_device"], "the model waited for its whole GPU, though it had named the stream")
    require(waits.total() == TURNS, f"the model's host has waited {waits.total()} times for {TURNS} requests")


def _not_named(client: Client) -> None:
    waits = _late_outputs(client, "late_unnamed")
    require(waits["synchronize_device"] >= TURNS, "the model did not wait for its GPU, and had named no stream")


def _late_outputs(client: Client, model: str) -> Counter[str]:
    """Check what is late in the model, and return how its host has waited."""
    with client.slot(model, COUNT) as slot:
        before = client.model.counts()
        for turn in range(TURNS):
            numbers = _upload_numbers(client, slot, turn)
            client.infer(slot)
            require(not slot.results.events, "the results name events that nobody asked for")
            expected = client.gpu.kernels.after_late(numbers)
            client.check_output(slot, expected, f"the output was sent too early in turn {turn}")
        after = client.model.counts()
    return Counter({name: after[name] - before[name] for name in WAITS})


def _upload_numbers(client: Client, slot: DeviceSlot, turn: int) -> npt.NDArray[np.float32]:
    numbers = np.arange(COUNT, dtype=np.float32) % 1000 + turn
    client.gpu.upload(slot.x, numbers)
    return numbers


def _stream_of_another_gpu(client: Client) -> str:
    with client.slot("names_foreign", COUNT) as slot:
        if client.gpu.runtime.device_count() == 1:
            client.infer(slot)
            return "there is one GPU, and so no such stream"
        reason = client.refusal(slot)
        require("[INTERNAL]" in reason or "shm:model" in reason, f"it is no error of the model's: {reason}")
    return reason


def _stream_waits(client: Client) -> str:
    with client.slot("late_by_event", COUNT) as slot:
        for turn in range(TURNS):
            numbers = _upload_numbers(client, slot, turn)
            models, ours = _waits(client.model.counts()), _waits(client.gpu.counts)
            client.infer(slot)
            events = slot.results.events
            require(events == (1,), f"the results name events of regions {events}; expected (1,)")
            slot.let_wait(client.gpu)
            require(_waits(client.model.counts()) == models, "the model's host has waited for its GPU")
            require(_waits(client.gpu.counts) == ours, "the client's host has waited for the model's GPU")
            expected = client.gpu.kernels.after_late(numbers)  # the stream that waits is the one that reads
            client.check_output(slot, expected, f"the output was read too early in turn {turn}")
    return f"{LATE_STEPS} kernels were under way, {TURNS} times"


def _host_asks(client: Client) -> str:
    gpu = client.gpu
    with client.slot("late_by_event", COUNT) as slot, client.slot("late_by_event", TAIL) as of_others:
        numbers = _upload_numbers(client, slot, 0)
        gpu.upload(of_others.x, numbers[:TAIL])
        client.infer(slot)
        slot.let_wait(client.gpu)
        deadline, calls = time.monotonic() + _PATIENCE_S, 0
        with contextlib.closing(Mark(OwnStreams(gpu.runtime), gpu.stream, 0)) as mark:
            while not calls or not mark.is_done():
                require(time.monotonic() < deadline, f"the call is not done after {calls} calls of others")
                client.infer(of_others)
                calls += 1
                time.sleep(_PAUSE_S)
        expected = gpu.kernels.after_late(numbers)
        client.check_output(slot, expected, "the call was done before the output was written")
        of_others.let_wait(client.gpu)
        gpu.runtime.synchronize_stream(gpu.stream, 0)
    return f"meanwhile others made {calls} calls"


CHECKS: Final[Mapping[str, Check]] = {
    "a stream that the model has named is waited for, once, and nothing else is": _named,
    "without a name the whole GPU is waited for": _not_named,
    "a stream of a GPU that the call does not use is refused": _stream_of_another_gpu,
    "with SHM_GPU_EVENTS the client's stream waits for the model's GPU, and no host does": _stream_waits,
    "a host that asks is told when its own call's work is done, while others' goes on": _host_asks,
}


def measure(client: Client, amounts: Amounts) -> list[Figure]:
    count = amounts.large_bytes // 4
    with client.slot("late", count) as plain, client.slot("late_by_event", count) as by_event:
        seconds = in_turns(
            {"plain": partial(_seconds, client, plain), "by event": partial(_seconds, client, by_event)},
            amounts.slow_rounds,
        )
    name = f"{LATE_STEPS} kernels on {in_words(amounts.large_bytes)} with SHM_GPU_EVENTS"
    figures = []
    for index, what in ((1, "result on the client's stream"), (0, "answer")):
        without, events = (statistics.median(each[index] for each in pairs) * 1e3 for pairs in seconds.values())
        figures.append(ratio(f"{name}: {what}", events, without, "× without"))
    return figures


def _seconds(client: Client, slot: DeviceSlot, number: int) -> tuple[float, float]:
    """Return when the answer was there, and when the client had read the end of the result."""
    tail = np.full(TAIL, number, np.float32)
    client.gpu.upload(slot.x[-TAIL:], tail)
    begin = time.perf_counter()
    client.infer(slot)
    answer = time.perf_counter() - begin
    if slot.results.events:
        slot.let_wait(client.gpu)
    found = client.gpu.download(slot.y[-TAIL:])  # on the stream that waits
    result = time.perf_counter() - begin
    expected = client.gpu.kernels.after_late(tail)
    require(bool((found == expected).all()), f"the output of {slot.model} was read too early")
    return answer, result


def _waits(counts: Counter[str]) -> int:
    return sum(counts[name] for name in WAITS)
