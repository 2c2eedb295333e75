"""A request that a model has begun with is never sent again, whatever the error says."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.client import InferenceError, PoolOptions
from shm_backend_utils.client.options import PathName
from shm_backend_utils.server import EmbeddedServer

from .either_client import TWO_FLAVOURS, EitherClient, open_client, url_of
from .registered import losing_files

X = np.arange(1000, dtype=np.float32)
PATHS: tuple[PathName, ...] = ("direct", "triton-shm", "inline")
# What errors say that do lead to another attempt; here they are a model's own, say of another model that it called.
MESSAGES = {
    "plain": "the model gave up",
    "unknown region": "Unable to find shared memory region: 'somebodys'",
    "refused region": "shm:refused: shm_slot refused: the token is not the region's",
    "refused request": "shm:stale: request parameter shm_generation is not the slot's",
}


@pytest.fixture(params=TWO_FLAVOURS)
def ours(request: pytest.FixtureRequest, triton_server: EmbeddedServer) -> Iterator[EitherClient]:
    pool = PoolOptions(region="system")  # whose files tests take away
    with open_client(request.param, url_of(triton_server, request.param), timeout_s=30, pool=pool) as client:
        yield client


def counts(client: EitherClient) -> Any:
    """Return how many requests came to the model, and with how many it began."""
    with client.infer("tally", {"X": X}, outputs=["COUNTS"], path="inline", parameters={"ask": 1}) as result:
        return result["COUNTS"].copy()


@pytest.mark.parametrize(
    ("message", "fail", "path"),
    [
        (message, fail, path)
        for (message, fail), path in zip(
            itertools.product(MESSAGES, ["half way", "at the end"]), itertools.cycle(PATHS), strict=False
        )
    ],
)
def test_a_model_that_fails_has_run_once(ours: EitherClient, path: PathName, message: str, fail: str) -> None:
    before = counts(ours)
    with pytest.raises(InferenceError) as failure:
        ours.infer("tally", {"X": X}, path=path, parameters={"fail": fail, "message": MESSAGES[message]})
    assert MESSAGES[message] in str(failure.value)
    assert (counts(ours) - before).tolist() == [1, 1]


@pytest.mark.parametrize("path", PATHS)
def test_a_refusal_that_nothing_can_mend_is_not_repeated(ours: EitherClient, path: PathName) -> None:
    before = counts(ours)
    with pytest.raises(InferenceError, match="the model gave up"):
        ours.infer("tally", {"X": X}, path=path, parameters={"fail": "before it begins"})
    assert (counts(ours) - before).tolist() == [1, 0]


@pytest.mark.parametrize("fails", [False, True], ids=["serves", "fails"])
def test_a_request_whose_memory_was_lost_is_sent_again_and_begun_once(ours: EitherClient, fails: bool) -> None:
    with losing_files():
        ours.infer("tally", {"X": X}, path="direct").release()
    before, retries = counts(ours), ours.stats().retries
    if fails:
        with pytest.raises(InferenceError, match="the model gave up"):
            ours.infer("tally", {"X": X}, path="direct", parameters={"fail": "half way"})
    else:
        ours.infer("tally", {"X": X}, path="direct").release()
    assert (counts(ours) - before).tolist() == [2, 1]
    assert ours.stats().retries == retries + 1
