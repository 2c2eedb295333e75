"""Sessions in the test's own process, behind an emulated Python backend."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.gpu.memory.access import CudaAccess
from shm_backend_utils.memory.registrations import Registration, StatusEndpoint
from shm_backend_utils.model import Call, ShmSession
from tests.unit.emulated import log_lines, start_server

__all__ = ["double", "say_registered", "session_of", "tensor"]


def tensor(name: str, dtype: str = "FP32", dims: Sequence[int] = (-1,), **more: Any) -> dict[str, Any]:
    return {"name": name, "data_type": f"TYPE_{dtype}", "dims": list(dims), "optional": True, **more}


@contextmanager
def session_of(
    monkeypatch: pytest.MonkeyPatch,
    inputs: Sequence[Mapping[str, Any]],
    outputs: Sequence[Mapping[str, Any]],
    *,
    cuda: CudaAccess | None = None,
    parameters: Mapping[str, str] | None = None,
    **config: Any,
) -> Iterator[ShmSession]:
    """Make a session of model `m`; ``parameters`` are those of config.pbtxt. What its log says at load is not kept."""
    start_server(monkeypatch)
    said = {name: {"string_value": text} for name, text in (parameters or {}).items()}
    described = {"name": "m", "input": list(inputs), "output": list(outputs), "parameters": said, **config}
    session = ShmSession.from_args({"model_config": json.dumps(described)}, cuda)
    log_lines().clear()
    try:
        yield session
    finally:
        session.close()


def double(call: Call) -> None:
    x = call.input("X")
    np.multiply(x.numpy(), 2, out=call.output("Y", x.shape, x.dtype).numpy())


def say_registered(monkeypatch: pytest.MonkeyPatch, found: Callable[[], Mapping[str, Registration]]) -> None:

    def find(_: StatusEndpoint, names: Sequence[str]) -> dict[str, Registration]:
        current = found()
        return {name: current[name] for name in names if name in current}

    monkeypatch.setattr(StatusEndpoint, "find", find)
    monkeypatch.setattr(StatusEndpoint, "all", lambda _: dict(found()))
