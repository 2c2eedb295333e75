"""The request that every check gets, how a server or a harness is asked to run one, and the models that do."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path
from typing import Any, Final

import numpy as np

from tests.conformance.backend.backend_checks import FAULT_CHECKS
from tests.unit.harness.wires import Tensor, Wire, request

HERE: Final = Path(__file__).parent
WORDS: Final = b"".join(struct.pack("<I", len(word)) + word for word in (b"a", "ü".encode(), b""))
INPUTS: Final = {
    "X": Tensor("FP32", [2, 3], np.arange(6, dtype=np.float32).tobytes()),
    "WORDS": Tensor("BYTES", [3], WORDS),
    "HALF": Tensor("BF16", [2], bytes.fromhex("803f2040")),  # 1 and 2.5
    "FLAGS": Tensor("BOOL", [2], b"\1\0"),
}
PARAMETERS: Final[dict[str, Any]] = {"number": 7, "yes": True, "half": 0.5, "word": 'ü"/\n'}
REST: Final[dict[str, Any]] = {"timeout": 9_000_000, "sequence_id": 42, "sequence_start": True}


def models_in(folder: Path) -> Path:
    """Copy the models there, each of those that run checks with the checks."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(HERE / "models", folder, ignore=ignored)
    for model in ("checks", "checks_decoupled"):
        shutil.copytree(HERE / "backend_checks", folder / model / "1" / "backend_checks", ignore=ignored)
    return folder


def ask(wire: Wire, check: str) -> str:
    if check in FAULT_CHECKS:
        numbers = {name: tensor for name, tensor in INPUTS.items() if name != "WORDS"}
        answer = wire.send("ModelInfer", request("checks", numbers, parameters={"check": check}))
        return answer.text.removeprefix("report:")
    more = {"check": check, **PARAMETERS, **REST}
    if "decoupled_check_" not in check:
        answer = wire.send("ModelInfer", request("checks", INPUTS, ["REPORT"], more, id="the-id"))
        assert answer.status == "OK", answer.text
        return _report(answer.message)
    more["triton_enable_empty_final_response"] = True
    message = request("checks_decoupled", INPUTS, ["REPORT"], more, id="the-id")
    wire.responses(message)
    (report,) = [answer.message for answer in wire.responses(message) if answer.message.outputs]
    return _report(report)


def _report(response: Any) -> str:
    (content,) = response.raw_output_contents
    return bytes(content[4:]).decode()
