"""The request that every check gets, and how a real server is asked to run one."""

from __future__ import annotations

import queue
from typing import Any, Final

import ml_dtypes
import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from tests.conformance.backend.backend_checks import FAULT_CHECKS

__all__ = ["DECOUPLED", "INPUTS", "PARAMETERS", "REST", "ask"]

DECOUPLED: Final = "decoupled_check_"
INPUTS: Final = (
    ("X", "FP32", np.arange(6, dtype=np.float32).reshape(2, 3)),
    ("WORDS", "BYTES", np.array([b"a", "ü".encode(), b""], object)),
    ("HALF", "BF16", np.array([1, 2.5], ml_dtypes.bfloat16)),
    ("FLAGS", "BOOL", np.array([True, False])),
)
PARAMETERS: Final = {"number": 7, "yes": True, "half": 0.5, "word": 'ü"/\n'}
REST: Final = {"request_id": "the-id", "sequence_id": 42, "sequence_start": True}
_PATIENCE_S: Final = 60


def ask(client: Any, check: str) -> str:
    """Return what a real server reports of a check."""
    if check in FAULT_CHECKS:
        inputs = [tensor for tensor in _inputs() if tensor.datatype() != "BYTES"]
        with pytest.raises(InferenceServerException) as refusal:
            client.infer("checks", inputs, parameters={"check": check})
        return str(refusal.value.message()).removeprefix("report:")
    if DECOUPLED not in check:
        result = client.infer(
            "checks",
            _inputs(),
            outputs=_outputs(),
            timeout=9_000_000,
            parameters={"check": check, **PARAMETERS},
            **REST,
        )
        return str(result.as_numpy("REPORT")[0].decode())
    _stream(client, check)
    return str(_stream(client, check)[0].as_numpy("REPORT")[0].decode())


def _inputs() -> list[Any]:
    made = []
    for name, datatype, array in INPUTS:
        tensor = triton.InferInput(name, array.shape, datatype)
        tensor.set_data_from_numpy(array)
        made.append(tensor)
    return made


def _outputs() -> list[Any]:
    return [triton.InferRequestedOutput("REPORT")]


def _stream(client: Any, check: str) -> list[Any]:
    """Return the responses of a decoupled model, without those that only end the stream and without errors."""
    answers: queue.Queue[Any] = queue.Queue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    try:
        client.async_stream_infer(
            "checks_decoupled",
            _inputs(),
            outputs=_outputs(),
            enable_empty_final_response=True,
            parameters={"check": check, **PARAMETERS},
            **REST,
        )
        found = []
        while True:
            result, error = answers.get(timeout=_PATIENCE_S)
            if error is not None:
                continue
            response = result.get_response()
            if response.outputs:
                found.append(result)
            if response.parameters["triton_final_response"].bool_param:
                return found
    finally:
        client.stop_stream()
