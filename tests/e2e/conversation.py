"""What a client and a model say to each other in the memory of a request that is under way."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

__all__ = ["conversed"]


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
