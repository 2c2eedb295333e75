"""What a call says beside its tensors reaches the model, and what the model learns of it."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.client import InferenceError, Result
from shm_backend_utils.client.options import PathName
from tests.e2e.flavours import AnyClient, Flavour

MODELS = ("call_facts", "identity", "request_facts", "rows", "running_sum")
X = np.ones(3, np.float32)


def facts(client: AnyClient, model: str = "request_facts", **named: Any) -> dict[str, Any]:
    """Return what the model was told: by the request itself, or as call_facts by the call."""
    with client.infer(model, {"X": X}, **named) as result:
        return facts_in(result)


def facts_in(result: Result) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(result["FACTS"].tobytes())
    return told


def test_a_version_that_the_server_does_not_have(client: AnyClient, path: PathName) -> None:
    with pytest.raises(InferenceError, match="request_facts"):
        facts(client, model_version="3", path=path)


def test_a_prepared_call_keeps_its_options(client: AnyClient, path: PathName) -> None:
    with client.prepare(
        "request_facts", {"X": ((3,), np.float32)}, request_id="seven", parameters={"a": 1}, path=path
    ) as call:
        for _ in range(2):
            with call.infer() as result:
                told = facts_in(result)
                assert (told["request_id"], told["parameters"]) == ("seven", {"a": 1})


def test_a_call_that_says_nothing_of_itself(client: AnyClient, path: PathName) -> None:
    told = facts(client, "call_facts", path=path)
    assert (told["request_id"], told["sequence"], told["left_s"], told["cancelled"]) == ("", None, None, False)


@pytest.mark.parametrize("sequence_id", [7, (1 << 63) - 1, "order 66"])
@pytest.mark.parametrize(("is_start", "is_end"), [(True, False), (False, False), (False, True), (True, True)])
def test_a_call_knows_its_place_in_a_sequence(
    client: AnyClient, path: PathName, sequence_id: int | str, is_start: bool, is_end: bool
) -> None:
    named: dict[str, Any] = {"sequence_id": sequence_id, "sequence_start": is_start, "sequence_end": is_end}
    assert facts(client, "call_facts", path=path, **named)["sequence"] == [sequence_id, is_start, is_end]


def test_small_and_large_calls_side_by_side_get_their_own(flavour: Flavour) -> None:
    with flavour.client(inline_bytes=2**12) as client:
        for count in (1, 100, 10_000, 3, 300, 30_000, 0, 5):
            x = np.arange(count, dtype=np.float32)
            with client.infer("identity", {"INPUT0": x}, outputs={"OUTPUT0": x.nbytes}) as result:
                np.testing.assert_array_equal(result["OUTPUT0"], x)
                assert result.path == ("inline" if count <= 500 else "direct")
