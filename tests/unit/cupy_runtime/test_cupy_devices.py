"""Which device is current, and what a device is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from shm_backend_utils.memory.cuda.cupy_runtime import CupyRuntime
from shm_backend_utils.memory.cuda.runtime import device_guard
from tests.unit.cupy_runtime.fake_cupy import EVERY_CALL, FakeCudaCalls


@pytest.mark.parametrize("ask", [ask for name, _, ask in EVERY_CALL if name != "setDevice"])
def test_no_call_but_one_changes_the_device(
    ask: Callable[[CupyRuntime], Any], calls: FakeCudaCalls, runtime: CupyRuntime
) -> None:
    ask(runtime)
    assert "setDevice" not in calls.names()


def test_a_guard_sets_the_device_by_the_runtime_and_back(calls: FakeCudaCalls, runtime: CupyRuntime) -> None:
    with device_guard(runtime, 1):
        assert runtime.current_device() == 1
    assert [call for call in calls.noted if call[0] == "setDevice"] == [("setDevice", 1), ("setDevice", 0)]


def test_a_uuid_is_32_lowercase_digits_with_its_zeros(runtime: CupyRuntime) -> None:
    assert runtime.device_uuid(0) == "0700ab000102030405060708090a0b0c"
    assert runtime.device_uuid(1) == "0800ab000102030405060708090a0b0c"


def test_a_uuid_is_asked_for_once(calls: FakeCudaCalls, runtime: CupyRuntime) -> None:
    first = runtime.device_uuid(0)
    calls.failing = "check_status"
    assert runtime.device_uuid(0) == first
