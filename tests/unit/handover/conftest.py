"""A registry that must have closed all it had when nothing is offered any more."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from shm_backend_utils.memory.handover.server import HandoverRegistry
from tests.unit.handover.asking import count_open, servers, settles


@pytest.fixture
def registry() -> Iterator[HandoverRegistry]:
    gc.collect()
    before = count_open()
    made = HandoverRegistry()
    yield made
    for number in list(made._offers):
        made.withdraw(number)
    assert settles(lambda: servers() == 0)
    gc.collect()
    assert settles(lambda: count_open() <= before), "descriptors were left open"
