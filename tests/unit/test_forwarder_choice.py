"""Which way a model's request to another one goes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.memory.cuda.access import CudaAccess
from shm_backend_utils.model.devices.arrays import DeviceArrays
from shm_backend_utils.model.forward import direct
from shm_backend_utils.model.forward.direct import DirectForwarding
from shm_backend_utils.model.forward.forwarder import Forwarder
from shm_backend_utils.model.forward.ordinary import OrdinaryForwarding
from shm_backend_utils.model.triton import TritonBackend
from shm_backend_utils.model_spec import ModelSpec
from shm_backend_utils.protocol import call_layout
from shm_backend_utils.protocol.spans import MAX_TENSORS
from tests.unit.emulated import start_server


@pytest.fixture
def forwarder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Forwarder]:
    monkeypatch.setattr(TritonBackend, "request", lambda *_: object())
    start_server(monkeypatch)
    made = Forwarder("caller", TritonBackend(), DeviceArrays(CudaAccess(), 0), "http://localhost:1")
    yield made
    made.close()


def spec_of(output_count: int, **more: Any) -> ModelSpec:
    def tensor(name: str, **more: Any) -> dict[str, Any]:
        return {"name": name, "data_type": "TYPE_FP32", "dims": [-1], **more}

    return ModelSpec.from_config(
        {
            "name": "called",
            "input": [tensor("X", optional=True)],
            "output": [tensor(f"Y{index}") for index in range(output_count)],
            "parameters": {"SHM_PATHS": {"string_value": "direct,inline"}},
            **more,
        }
    )


@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        (spec_of(1), DirectForwarding),
        (spec_of(MAX_TENSORS), OrdinaryForwarding),
    ],
    ids=["of two tensors", "of more tensors than a slot tells of"],
)
def test_a_request_to_a_model(
    forwarder: Forwarder, monkeypatch: pytest.MonkeyPatch, spec: ModelSpec, kind: type
) -> None:
    monkeypatch.setattr(forwarder._specs, "spec", lambda model, version: spec)
    forwarding = forwarder.begin("called", {"X": np.ones(3, np.float32)}, ["Y0"], {}, "", "", [])
    assert type(forwarding) is kind
    forwarding.give_up()


@pytest.mark.parametrize("hint", [16, np.int64(16), np.uint8(16)])
def test_room_for_an_output_may_be_an_integer_of_numpy(
    forwarder: Forwarder, monkeypatch: pytest.MonkeyPatch, hint: int
) -> None:
    spec = spec_of(1)
    rooms: list[object] = []

    def looking(*given: Any, **named: Any) -> Any:
        rooms.append(given[2]["Y0"])
        return call_layout.lay_out(*given, **named)

    monkeypatch.setattr(direct, "lay_out", looking)
    monkeypatch.setattr(forwarder._specs, "spec", lambda model, version: spec)
    forwarder.begin("called", {"X": np.ones(3, np.float32)}, {"Y0": hint}, {}, "", "", []).give_up()
    assert rooms == [16]
