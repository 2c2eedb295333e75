"""What is said of sealed memory where a model can fetch it, and where it cannot; and what is done then."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from shm_backend_utils.client import PathUnavailableError
from shm_backend_utils.client.explanation import Check, Explanation
from shm_backend_utils.memory.segment import SealedSegment, SystemSegment
from shm_backend_utils.protocol.handover import SealedKey

from .flavours import AnyClient
from .own_regions import own_regions

X = {"X": np.ones(4, np.float32)}
ROOM = {"Y": 16}
BY_NOBODY = "do not share a network namespace"


def sealed_check(explanation: Explanation) -> Check | None:
    return next((check for check in explanation.checks if check.name == "sealed memory?"), None)


def kinds() -> set[type]:
    return {type(region) for region in own_regions()}


def infer(client: AnyClient) -> set[type]:
    """Infer, and return what the memory was made of."""
    with client.infer("direct_only", X, outputs=ROOM) as result:
        assert result.path == "direct"
        assert result["Y"].tolist() == [1] * 4
        return kinds()


def name_a_socket_that_nobody_has(patch: pytest.MonkeyPatch) -> None:
    """Have models look for this process' handover server where none is, as in another network namespace."""
    patch.setattr(SealedKey, "__str__", lambda key: f"shmbu-fd-{'0' * 32}-{key.number}")


@pytest.mark.parametrize("region", ["auto", "sealed"])
def test_where_it_can_be_fetched_it_is_taken(any_client: AnyClient) -> None:
    check = sealed_check(any_client.explain("direct_only"))
    assert check is not None
    assert check.outcome is True
    assert "the model has fetched some by a socket" in check.detail
    assert infer(any_client) == {SealedSegment}


@pytest.mark.parametrize("region", ["auto"])
def test_where_it_cannot_be_fetched_memory_in_dev_shm_is_taken(
    any_client: AnyClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    name_a_socket_that_nobody_has(monkeypatch)
    explanation = any_client.explain("direct_only")
    check = sealed_check(explanation)
    assert check is not None
    assert check.outcome is False
    assert "the model could not fetch it" in check.detail
    assert BY_NOBODY in check.detail
    assert (explanation.path, explanation.reason) == ("direct", "nothing stands against it")
    assert infer(any_client) == {SystemSegment}
    assert any_client.stats().retries == 0


@pytest.mark.parametrize("region", ["sealed"])
def test_where_no_other_memory_may_be_taken_the_path_is_closed_and_it_is_said_why(
    any_client: AnyClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    name_a_socket_that_nobody_has(monkeypatch)
    with pytest.raises(PathUnavailableError, match=rf'{BY_NOBODY} .*PoolOptions\(region="system"\)'):
        any_client.infer("direct_only", X)
    explanation = any_client.explain("rows")
    assert explanation.path == "triton-shm"
    assert BY_NOBODY in explanation.reason


@pytest.mark.parametrize("region", ["auto"])
def test_what_cannot_be_fetched_any_more_is_replaced_by_memory_in_dev_shm_with_a_warning(
    any_client: AnyClient, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    any_client.explain("direct_only")
    name_a_socket_that_nobody_has(monkeypatch)
    with caplog.at_level(logging.WARNING):
        assert SystemSegment in infer(any_client)
    assert "calls of model 'direct_only' take memory in /dev/shm from now on" in caplog.text
    assert "shm_slot is handed over by nobody" in caplog.text
