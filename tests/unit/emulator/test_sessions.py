"""A session of this library in the emulator: requests that bring their tensors, with and without the fault."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.model import ShmSession
from shm_backend_utils.testing.emulator import NAME, Faults, backend_module, sent_outputs
from tests.unit.emulator.test_emulated_requests import Host, Sink, delivered

CONFIG = {
    "name": "m",
    "input": [{"name": "X", "data_type": "TYPE_FP32", "dims": [-1], "optional": True}],
    "output": [{"name": "Y", "data_type": "TYPE_FP32", "dims": [-1]}],
}


@pytest.mark.parametrize("faults", [Faults(), Faults(is_stub_for_numpy_1=True)], ids=["faultless", "for NumPy 1"])
def test_a_session_serves_what_comes_with_a_request(monkeypatch: pytest.MonkeyPatch, faults: Faults) -> None:
    host = Host()
    host.backend = backend_module(host, faults)
    monkeypatch.setitem(sys.modules, NAME, host.backend)
    with closing(ShmSession.from_args({"model_config": json.dumps(CONFIG)})) as session:
        array = np.arange(3, dtype=np.float32)
        request = delivered(host, Sink(), is_decoupled=False, inputs=[("X", "FP32", array)])

        def double(call: Any) -> None:
            call.put("Y", call.input("X").numpy() * 2)

        (response,) = session.serve([request], double)
        assert not response.has_error(), response.error().message()
        (sent,) = sent_outputs(response)
        assert sent.array is not None
        assert sent.array.tolist() == [0, 2, 4]


def test_what_a_model_raises_is_the_requests_error(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host()
    monkeypatch.setitem(sys.modules, NAME, host.backend)
    with closing(ShmSession.from_args({"model_config": json.dumps(CONFIG)})) as session:

        def fail(call: Any) -> None:
            raise ValueError("no")

        inputs = [("X", "FP32", np.zeros(1, np.float32))]
        (response,) = session.serve([delivered(host, Sink(), is_decoupled=False, inputs=inputs)], fail)
        assert response.error().message() == "ValueError: no"
        assert response.error().code() == host.backend.TritonError.INTERNAL
