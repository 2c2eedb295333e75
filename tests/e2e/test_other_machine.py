"""Clients that cannot share memory with the server: they get the same results, inline."""

from __future__ import annotations

import numpy as np
import pytest

from shm_backend_utils.client import PathUnavailableError
from shm_backend_utils.client.errors import MemoryRefusedError
from shm_backend_utils.client.paths import choice as paths
from shm_backend_utils.client.paths import triton_shm as registration
from shm_backend_utils.client.steps import Steps

from .flavours import AnyClient


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
def test_a_model_for_the_direct_path_alone_cannot_be_called_from_another_machine(any_client: AnyClient) -> None:
    with pytest.raises(PathUnavailableError, match="is another machine, which shares no memory"):
        any_client.infer("direct_only", {"X": np.ones(4, np.float32)})
