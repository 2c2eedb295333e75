"""Clients that cannot share memory with the server: they get the same results, inline."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.client import PathUnavailableError
from shm_backend_utils.client.errors import MemoryRefusedError
from shm_backend_utils.client.paths import choice as paths
from shm_backend_utils.client.paths import triton_shm as registration
from shm_backend_utils.client.steps import Steps

from .flavours import AnyClient, Flavour
from .stranger import NOT_PERMITTED

STRANGER = Path(__file__).with_name("stranger.py")


def told_by_a_stranger(flavour: Flavour, region: str) -> Any:
    stranger = subprocess.run(
        [sys.executable, str(STRANGER), flavour.url, "aio" if flavour.is_aio else "blocking", region],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if stranger.returncode == NOT_PERMITTED:
        pytest.skip("mount namespaces are not permitted here")
    assert stranger.returncode == 0, stranger.stderr
    told = json.loads(stranger.stdout)
    assert told["doubled"] == told["expected"]
    assert "they do not share /dev/shm" in told["refusal"]
    return told


def test_a_client_in_another_container_gets_the_same_inline(flavour: Flavour) -> None:
    told = told_by_a_stranger(flavour, "system")
    assert told["path"] == "inline"
    assert "they do not share /dev/shm (containers: --ipc=host, or one shared volume)" in told["reason"]


@pytest.mark.parametrize("region", ["auto", "sealed"])
def test_a_client_in_another_container_of_a_pod_shares_sealed_memory(flavour: Flavour, region: str) -> None:
    told = told_by_a_stranger(flavour, region)
    assert told["path"] == "direct"
    assert told["reason"] == "nothing stands against it"


@pytest.fixture
def _under_another_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "is_this_machine", lambda host: False)


@pytest.fixture
def _elsewhere(monkeypatch: pytest.MonkeyPatch, _under_another_address: None) -> None:
    def refuse(*arguments: object) -> Steps[None]:
        raise MemoryRefusedError("Unable to open shared memory region")

    monkeypatch.setattr(registration.Registrations, "add", refuse)


@pytest.mark.usefixtures("_under_another_address")
def test_a_server_in_another_container_that_shares_memory_gets_no_tensors(any_client: AnyClient) -> None:
    with any_client.infer("rows", {"X": np.ones((1, 4), np.float32)}, outputs=["DOUBLED"]) as result:
        assert result.path == "direct"
    assert "127.0.0.1 shares memory with this machine" in str(any_client.explain("rows"))


@pytest.mark.usefixtures("_elsewhere")
def test_a_client_on_another_machine_gets_the_same_inline(any_client: AnyClient) -> None:
    x = np.arange(24, dtype=np.float32).reshape(6, 4)
    with any_client.infer("rows", {"X": x}, outputs=["DOUBLED"], split=True) as result:
        assert result.path == "inline"
        np.testing.assert_array_equal(result["DOUBLED"], x * 2)
    assert "127.0.0.1 is another machine, which shares no memory" in any_client.explain("rows").reason
    assert any_client.stats().pool_bytes == 0


@pytest.mark.usefixtures("_elsewhere")
def test_a_client_on_another_machine_is_told_why_it_cannot_share_memory(any_client: AnyClient) -> None:
    with pytest.raises(PathUnavailableError, match="127.0.0.1 is another machine, which shares no memory"):
        any_client.infer("rows", {"X": np.ones((1, 4), np.float32)}, path="direct")


@pytest.mark.usefixtures("_elsewhere")
def test_a_model_for_the_direct_path_alone_cannot_be_called_from_another_machine(any_client: AnyClient) -> None:
    with pytest.raises(PathUnavailableError, match="is another machine, which shares no memory"):
        any_client.infer("direct_only", {"X": np.ones(4, np.float32)})
