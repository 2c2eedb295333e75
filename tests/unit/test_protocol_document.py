"""The examples in docs/protocol.md are valid, and the drawing agrees with the code."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np

from shm_backend_utils.client.result import result_of
from shm_backend_utils.client.space import HostSpace
from shm_backend_utils.protocol import descriptor
from shm_backend_utils.protocol import region_layout as layout
from shm_backend_utils.protocol.results import parse_results
from shm_backend_utils.tensors.strings import Strings

DOCUMENT = (Path(__file__).resolve().parents[2] / "docs" / "protocol.md").read_text()
DESCRIPTOR, RESULTS = re.findall(r"```json\n(.*?)```", DOCUMENT, re.DOTALL)


def test_the_descriptor_is_one() -> None:
    parsed = descriptor.parse(DESCRIPTOR)
    assert parsed.inputs["IMAGE"].shape == (8, 480, 640, 3)
    assert json.loads(descriptor.encode(parsed)) == json.loads(DESCRIPTOR)


def test_the_results_can_be_read() -> None:
    byte_size = json.loads(DESCRIPTOR)["regions"][0]["byte_size"]

    names = Strings.of("NAMES", np.array([["cat", b"dog"]] * 8, object))

    class Response:
        def as_numpy(self, name: str) -> np.ndarray:
            return names.encoded if name == "NAMES" else np.zeros(3, np.int32)

    places = parse_results(RESULTS.encode(), [byte_size])
    result = result_of(places, [HostSpace(0, byte_size)], np.zeros(byte_size, np.uint8), Response())
    assert result["OUTPUT0"].shape == (8, 3, 224, 224)
    assert result["NAMES"].tolist() == [[b"cat", b"dog"]] * 8
    assert result.overflowed == {"LABELS": 12, "NAMES": 16 * (4 + 3)}


def test_the_drawing_shows_the_layout() -> None:
    assert f"up to {layout.MAX_RESULTS_LENGTH} " in DOCUMENT
    assert layout.data_offset(1) == 8192
    assert f"at most {descriptor.MAX_DESCRIPTOR_LENGTH:,} characters" in DOCUMENT
