"""Client and server in two containers of a pod: of their own are processes and /dev/shm; the network is common."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from shm_backend_utils.cli.common.server import REPOSITORY, copy_models
from shm_backend_utils.server import EmbeddedServer

from .container import OWN_CONTAINER, Program, needs, running
from .flavours import url_of


class Pod(NamedTuple):
    """A server in a container, and its addresses by protocol."""

    server: Program
    urls: dict[str, str]


@pytest.fixture(scope="module")
def pod(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pod]:
    needs(*OWN_CONTAINER)
    folder = tmp_path_factory.mktemp("pod")
    models = copy_models([REPOSITORY / "identity", REPOSITORY / "multiply"], folder / "models")
    words = str(models), str(folder / "server.log")
    with running("server", *words, namespaces=OWN_CONTAINER, folder=folder) as server:
        yield Pod(server, server.told())


def used_bytes(program: Program) -> int:
    space = os.statvfs(program.shm)
    return (space.f_blocks - space.f_bfree) * space.f_frsize


def called_in(pod: Pod, protocol: str, region: str, row_count: str, folder: Path) -> Any:
    """Return what a client in another container tells, after a look at what is in /dev/shm while its result lives."""
    before = used_bytes(pod.server)
    words = pod.urls[protocol], region, row_count
    with running("client", *words, namespaces=OWN_CONTAINER, folder=folder) as client:
        told = client.told()
        assert not client.shm.samefile(pod.server.shm)
        assert used_bytes(client) == 0
        assert used_bytes(pod.server) == before or told["paths"] != ["direct"] * 2
        assert list(pod.server.shm.glob("shmbu-*")) == list(client.shm.iterdir()) == []
        client.go_on()
    return told


def test_more_than_dev_shm_holds_goes_through_sealed_memory(pod: Pod, protocol: str, tmp_path: Path) -> None:
    told = called_in(pod, protocol, "auto", "32", tmp_path)  # 128 MiB
    assert (told["paths"], told["in place"], told["right"]) == (["direct"] * 2, True, True)
    assert "model 'identity' takes the path direct" in told["why"]
    assert "the model has fetched some by a socket" in told["why"]
    assert "they do not share /dev/shm" in told["why"]  # what the other paths lack


def test_without_sealed_memory_there_is_another_path(pod: Pod, protocol: str, tmp_path: Path) -> None:
    told = called_in(pod, protocol, "system", "1", tmp_path)
    assert (told["paths"], told["in place"], told["right"]) == (["inline"] * 2, False, True)
    assert "model 'identity' takes the path inline" in told["why"]
    assert "they do not share /dev/shm" in told["why"]
    assert "sealed memory?" not in told["why"]


def test_another_network_has_other_memory(triton_server: EmbeddedServer, protocol: str, tmp_path: Path) -> None:
    needs("--net")
    url = url_of(triton_server, protocol)
    with running("another_network", url, namespaces=(), folder=tmp_path) as client:
        told = client.told()
    assert (told["path"], told["right"]) == ("direct", True)
    assert "share a network namespace" in told["why"]
    assert "share a network namespace" in told["refusal"]
