"""Which path a model's calls take, and what prevents a better one."""

from __future__ import annotations

import numpy as np
import pytest

from shm_backend_utils.client import PathUnavailableError
from shm_backend_utils.client.options import PathName
from tests.e2e.eventually import all_memory_comes_back
from tests.e2e.flavours import AnyClient, Flavour

MODELS = ("direct_only", "rows", "strangers_only", "unaware")

X = {"X": np.ones(4, np.float32)}


def test_every_check_is_a_line_of_the_text(client: AnyClient) -> None:
    explanation = client.explain("rows")
    first, *lines = str(explanation).splitlines()
    assert first == "model 'rows' takes the path direct: nothing prevents it"
    assert [check.name for check in explanation.checks if check.outcome is None] == []
    assert len(lines) == len(explanation.checks)
    for line, check in zip(lines, explanation.checks, strict=True):
        assert check.name in line
        assert check.detail in line


def test_a_model_that_does_not_know_this_library_is_told_how_to(client: AnyClient) -> None:
    explanation = client.explain("unaware")
    assert "model 'unaware' does not declare the direct path" in explanation.reason
    assert 'add to its config.pbtxt: parameters { key: "SHM_PATHS" value: ' in explanation.reason
    assert [check.name for check in explanation.obstacles("direct")] == ["declares direct?", "inputs optional?"]
    assert "input 'X' of model 'unaware' is not optional" in str(explanation)


def test_an_explanation_is_what_calls_do(client: AnyClient) -> None:
    for model, expected in (("unaware", "triton-shm"), ("strangers_only", "triton-shm"), ("direct_only", "direct")):
        assert client.explain(model).path == expected
        with client.infer(model, X) as result:
            assert result.path == expected


@pytest.mark.parametrize(
    ("model", "path", "complaint"),
    [
        ("direct_only", "inline", "SHM_PATHS of model 'direct_only' does not name inline"),
        ("direct_only", "triton-shm", "SHM_PATHS of model 'direct_only' does not name triton-shm"),
        ("unaware", "direct", "model 'unaware' does not declare the direct path"),
        ("strangers_only", "direct", "to the parameter SHM_ALLOWED_UIDS of model 'strangers_only'"),
    ],
)
def test_a_closed_path_that_is_asked_for_by_name_is_an_error_that_says_why(
    client: AnyClient, model: str, path: PathName, complaint: str
) -> None:
    explanation = client.explain(model)
    assert not explanation.open(path)
    assert complaint in str(explanation)
    with pytest.raises(PathUnavailableError, match=f"cannot be called on the path '{path}': .*{complaint}"):
        client.infer(model, X, path=path)
    with pytest.raises(PathUnavailableError, match=complaint):
        client.prepare(model, {"X": ((4,), np.float32)}, path=path)
    all_memory_comes_back(client)


def test_a_client_can_be_made_for_one_path(flavour: Flavour) -> None:
    with flavour.client(path="inline") as client:
        with client.infer("rows", {"X": np.ones((1, 4), np.float32)}) as result:
            assert result.path == "inline"
        with client.infer("rows", {"X": np.ones((1, 4), np.float32)}, path="auto") as result:
            assert result.path == "direct"
        with pytest.raises(PathUnavailableError):
            client.infer("direct_only", X)
