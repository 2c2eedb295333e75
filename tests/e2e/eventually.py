"""Waiting for what another thread, or a model, is about to do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from .flavours import AnyClient

DEADLINE_S = 40.0

T = TypeVar("T")


def eventually(look: Callable[[], T | None], told: Callable[[], object] = str) -> T:
    """Return what is found as soon as there is something; if nothing comes, the error says what is told."""
    deadline = time.monotonic() + DEADLINE_S
    while not (found := look()):
        assert time.monotonic() < deadline, told()
        time.sleep(0.001)
    return found


def all_memory_comes_back(client: AnyClient) -> None:
    """Return as soon as no slot is held or in doubt: a worker thread lets go of its last call only when it goes on."""
    eventually(lambda: client.stats().slots_held == 0 == client.stats().quarantined)


def conversed(question: Any, answer: Any, infer: Callable[[], object]) -> list[int]:
    """Infer; meanwhile wait for the model's first number, and write 76 behind the question. Return what was seen."""
    has_ended = threading.Event()
    seen = []

    def converse() -> None:
        while answer[0] == 0 and not has_ended.wait(0.001):
            pass
        seen.append(int(answer[0]))
        question[1] = 76

    conversation = threading.Thread(target=converse)
    conversation.start()
    infer()
    has_ended.set()
    conversation.join()
    return seen
