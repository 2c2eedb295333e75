"""BF16 in a response, where the Python backend is of a Triton that carries none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shm_backend_utils.dtypes import BF16
from shm_backend_utils.errors import ModelError
from shm_backend_utils.model.triton import TritonBackend
from tests.unit.emulated import start_server

REASON = "Dtype is invalid."  # Triton 2.41's words


@pytest.fixture
def old_backend(monkeypatch: pytest.MonkeyPatch) -> TritonBackend:
    """The backend of a Triton that takes no BF16 by DLPack, nor anything else once it was probed."""
    start_server(monkeypatch)
    backend = TritonBackend()

    def refuse(name: str, capsule: object) -> Any:
        raise RuntimeError(REASON)

    monkeypatch.setattr(backend._pb_utils.Tensor, "from_dlpack", refuse)
    return backend


def test_the_error_tells_which_triton_carries_it_and_what_helps_before(old_backend: TritonBackend) -> None:
    with pytest.raises(ModelError) as refusal:
        old_backend.output("Y", np.zeros((2, 3), BF16.numpy))
    assert str(refusal.value) == (
        "output 'Y' holds BF16, which the Python backend of this Triton refuses (Dtype is invalid.): a response "
        'carries it from Triton 2.49 (24.08) on; before, the caller must have room for it: outputs={"Y": 12}'
    )


def test_what_is_refused_of_another_type_is_told_as_it_is(old_backend: TritonBackend) -> None:
    old_backend.reads_numpy = False
    with pytest.raises(RuntimeError, match=REASON):
        old_backend.output("Y", np.zeros(3, np.float32))
