"""Prepared calls whose outputs have sizes that nobody knows: from the second response on they lie in shared memory."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from shm_backend_utils.client import DeadlineExceededError, Result, ShmClient
from shm_backend_utils.server import EmbeddedServer

from .eventually import all_memory_comes_back

INPUTS = {"COUNT_AND_DELAY_US": ((2,), np.int64)}


def count_to(call: Any, count: int, delay_us: int = 0, **named: Any) -> Result:
    call.inputs["COUNT_AND_DELAY_US"][:] = count, delay_us
    result: Result = call.infer(**named)
    return result


def test_rounds_of_late_requests_give_not_one_wrong_byte(triton_server: EmbeddedServer) -> None:
    given_up = 0
    with ShmClient(f"http://{triton_server.http_url}", timeout_s=30) as client:
        for round_number in range(100):
            with client.prepare("counting", INPUTS, outputs=["NUMBERS"]) as call:
                for _ in range(2):
                    count_to(call, 300 + round_number).release()
                try:
                    count_to(call, 300, 3000, timeout_s=0.002)
                except DeadlineExceededError:
                    given_up += 1
            with client.prepare("counting", INPUTS, outputs={"NUMBERS": 4000}) as call:
                result = count_to(call, 700, 100)
                assert result["NUMBERS"].tolist() == list(range(700))
                kept = result["NUMBERS"].copy()
                time.sleep(0.002)
                np.testing.assert_array_equal(result["NUMBERS"], kept)
            del result
        assert given_up > 30
        all_memory_comes_back(client)
