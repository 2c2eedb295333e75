"""A client of triton-shm-client's kind that nobody closes, and that has no model, leaves nothing behind."""

from __future__ import annotations

import gc
import weakref

from shm_backend_utils.compat.triton_shm_client import TritonSHMClient

NOBODY = "127.0.0.1:1"


def test_an_abandoned_client_without_models_is_forgotten() -> None:
    client = TritonSHMClient(NOBODY)
    at_exit = weakref.ref(client._at_exit)
    del client
    gc.collect()
    assert at_exit() is None
