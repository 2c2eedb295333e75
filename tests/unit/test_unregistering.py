"""A region that a request has just used is unregistered as soon as the server has let go of it."""

from __future__ import annotations

import pytest
from tritonclient.utils import InferenceServerException

from shm_backend_utils.client.unregistering import unregister_when_free


class Region:
    """One that is in use for some attempts."""

    def __init__(self, in_use: int, message: str = "Cannot unregister region 'x', it is currently in use.") -> None:
        self.in_use = in_use
        self.message = message
        self.attempts = 0

    def unregister(self) -> None:
        self.attempts += 1
        if self.attempts <= self.in_use:
            raise InferenceServerException(self.message)


@pytest.mark.parametrize("in_use", [0, 1, 3])
def test_it_is_tried_until_it_is_free(in_use: int) -> None:
    region = Region(in_use)
    unregister_when_free(region.unregister)
    assert region.attempts == in_use + 1


def test_what_stays_in_use_is_an_error() -> None:
    region = Region(1000)
    with pytest.raises(InferenceServerException, match="currently in use"):
        unregister_when_free(region.unregister, patience_s=0.03)
    assert region.attempts > 1


def test_another_refusal_is_one_at_once() -> None:
    region = Region(1, "no")
    with pytest.raises(InferenceServerException, match="no"):
        unregister_when_free(region.unregister)
    assert region.attempts == 1
