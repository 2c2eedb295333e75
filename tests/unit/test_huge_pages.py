"""Which models take sealed memory of huge pages: those that are told to."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator

import pytest

from shm_backend_utils.errors import RegionRefusedError
from shm_backend_utils.memory.descriptors import Descriptor
from shm_backend_utils.memory.handover.fetching import Fetcher
from shm_backend_utils.memory.kinds import HUGE_PAGE_SIZE
from shm_backend_utils.model.config import Config
from shm_backend_utils.model.mapping import policy
from tests.unit.fetching.scripted_desk import FIELD, SEALS, TOKEN, ScriptedDesk, give


@pytest.fixture
def fetcher() -> Iterator[Fetcher]:
    with contextlib.closing(Fetcher(1.0)) as fetcher:
        yield fetcher


def memory_of_huge_pages() -> Descriptor:
    """Return a sealed memfd of one huge page, which is a hole: no page is taken from the machine."""
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | os.MFD_HUGETLB | os.MFD_HUGE_2MB
    made = Descriptor(os.memfd_create, "huge", flags)
    os.fchmod(made.fileno(), 0o600)
    os.ftruncate(made.fileno(), HUGE_PAGE_SIZE)
    fcntl.fcntl(made.fileno(), fcntl.F_ADD_SEALS, SEALS)
    return made


def refusal_of(fetcher: Fetcher, config: Config) -> str:
    with ScriptedDesk(give(memory_of_huge_pages())) as desk, pytest.raises(RegionRefusedError) as refused:
        policy.open_managed(str(desk.key), TOKEN, config, fetcher, FIELD)
    return refused.value.reason


def test_by_default_a_model_takes_none(fetcher: Fetcher) -> None:
    assert "its pages have 2097152 bytes" in refusal_of(fetcher, Config())


def test_one_that_is_told_to_looks_what_they_hold(fetcher: Fetcher) -> None:
    assert "no header of a managed region" in refusal_of(fetcher, Config(huge_pages=True))
