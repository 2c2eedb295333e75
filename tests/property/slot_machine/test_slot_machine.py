"""Pool, slots, leases and results together, where any system call may fail: the machine, and how long it runs."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from tests.property.slot_machine.machine import SlotMachine


def test_no_order_of_steps_and_failures_hurts_a_call_or_loses_memory(request: pytest.FixtureRequest) -> None:
    count = request.config.getoption("--examples") * (1 + request.config.getoption("--all"))
    run_state_machine_as_test(SlotMachine, settings=settings(max_examples=count, stateful_step_count=40))
