"""Clients for registered models that nobody closes: of those that are garbage nothing is left that grows."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any, Final

import pytest

from shm_backend_utils import forks
from shm_backend_utils.compat.triton_shm_client import TritonSHMClient
from shm_backend_utils.server import EmbeddedServer

from .eventually import eventually
from .two_classes import ORDINARY, ROWS, Declared, x_of

MANY: Final = 5
KINDS: Final = pytest.mark.parametrize("declared", [ROWS, ORDINARY], ids=["direct", "registered at the server"])


def abandoned(server: EmbeddedServer, declared: Declared) -> tuple[dict[str, Any], weakref.ref[Any]]:
    """Have a client make as many requests at once as it may, and let go of it; return its models, and one of them."""
    client = TritonSHMClient(server.grpc_url)
    declared.register(client)
    x = x_of(20)
    client.infer_shm(declared.model, {"X": x} if declared is ROWS else {"X": x, "N": x[:, :1]})
    return client.registered_models, weakref.ref(client.registered_models[declared.model])


def close(models: dict[str, Any]) -> None:
    """Do what is done at exit."""
    while models:
        models.popitem()[1].close()


@KINDS
def test_clients_that_are_garbage_keep_no_thread(triton_server: EmbeddedServer, declared: Declared) -> None:
    close(abandoned(triton_server, declared)[0])
    gc.collect()
    before = threading.active_count()
    models = [abandoned(triton_server, declared)[0] for _ in range(MANY)]
    eventually(lambda: threading.active_count() <= before)
    for each in models:
        close(each)


def test_a_client_that_is_garbage_is_gone_if_the_server_knows_nothing_of_it(triton_server: EmbeddedServer) -> None:
    owners = len(forks._OWNERS)
    models, model = abandoned(triton_server, ROWS)
    del models
    gc.collect()
    assert model() is None
    eventually(lambda: gc.collect() >= 0 and len(forks._OWNERS) <= owners)  # a thread of it may be about to end


def test_what_the_server_knows_of_a_client_that_is_garbage_is_kept_for_the_exit(triton_server: EmbeddedServer) -> None:
    models, model = abandoned(triton_server, ORDINARY)
    del models
    gc.collect()
    kept = model()
    assert kept is not None
    kept.close()
