"""What the package itself offers: shown to people, known to type checkers, and loaded when it is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import shm_backend_utils
from shm_backend_utils.client import AsyncShmClient, ShmClient
from shm_backend_utils.errors import ShmError
from shm_backend_utils.model import ShmSession
from shm_backend_utils.tensors.attributes import BufferAttributes, MemoryType
from shm_backend_utils.tensors.view import TensorView

if TYPE_CHECKING:
    from typing_extensions import assert_type

    assert_type(shm_backend_utils.AsyncShmClient, type[AsyncShmClient])
    assert_type(shm_backend_utils.BufferAttributes, type[BufferAttributes])
    assert_type(shm_backend_utils.MemoryType, type[MemoryType])
    assert_type(shm_backend_utils.ShmClient, type[ShmClient])
    assert_type(shm_backend_utils.ShmError, type[ShmError])
    assert_type(shm_backend_utils.ShmSession, type[ShmSession])
    assert_type(shm_backend_utils.TensorView, type[TensorView])


@pytest.mark.parametrize(
    "known", [AsyncShmClient, BufferAttributes, MemoryType, ShmClient, ShmError, ShmSession, TensorView]
)
def test_a_public_name_is_what_it_is_where_it_lives(known: type) -> None:
    assert getattr(shm_backend_utils, known.__name__) is known


def test_every_public_name_is_shown() -> None:
    assert set(dir(shm_backend_utils)) >= set(shm_backend_utils.__all__)
