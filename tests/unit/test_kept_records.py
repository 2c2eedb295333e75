"""What pytest keeps of a test's log keeps none of its memory."""

from __future__ import annotations

import asyncio
import gc
import weakref

import numpy as np
import pytest


def test_an_error_in_an_event_loop_keeps_no_memory_of_who_runs_it(caplog: pytest.LogCaptureFixture) -> None:
    def run_a_loop() -> weakref.ref[object]:
        memory = np.zeros(3)

        def fails() -> None:
            raise RuntimeError("an event of another loop")

        async def lets_it_fail() -> None:
            asyncio.get_running_loop().call_soon(fails)
            await asyncio.sleep(0)

        asyncio.run(lets_it_fail())
        return weakref.ref(memory)

    memory = run_a_loop()
    gc.collect()  # asyncio's own frame and the error refer to each other
    assert memory() is None
    assert "RuntimeError: an event of another loop" in caplog.text
