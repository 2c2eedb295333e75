"""Which tests run: with ``--all`` every one; without, what is long is left out, and other flavours of one test are.

A flavour is a kind of client: over gRPC or HTTP, blocking or on asyncio. Tests that are marked ``every_flavour`` ask
all four for what they share. Each other test of ``OF_ONE_FLAVOUR`` runs on one of its flavours. Its name decides which
one, so that it is always the same, and all tests together are spread evenly.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from typing import Final

import pytest

OF_ONE_FLAVOUR: Final = ("tests/crash/", "tests/e2e/", "tests/harness/")
_FLAVOURS: Final = {"grpc", "http", "grpc aio", "http aio", "blocking", "aio"}


def left_out(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Return the tests that run with ``--all`` alone."""
    flavours: dict[str, set[tuple[str, ...]]] = {}
    for item in items:
        if _has_one_flavour(item):
            name, flavour = _name_and_flavour(item.nodeid)
            flavours.setdefault(name, set()).add(flavour)
    return [item for item in items if item.get_closest_marker("long") or _is_another_flavour(item, flavours)]


def _has_one_flavour(item: pytest.Item) -> bool:
    return item.nodeid.startswith(OF_ONE_FLAVOUR) and item.get_closest_marker("every_flavour") is None


def _is_another_flavour(item: pytest.Item, flavours: dict[str, set[tuple[str, ...]]]) -> bool:
    if not _has_one_flavour(item):
        return False
    name, flavour = _name_and_flavour(item.nodeid)
    among = sorted(flavours[name])
    return flavour != among[zlib.crc32(name.encode()) % len(among)]


def _name_and_flavour(nodeid: str) -> tuple[str, tuple[str, ...]]:
    """Return a test's name without the words for a flavour, and those words."""
    function, _, case = nodeid.partition("[")
    words = re.split(r"-(?!shm\b)", case.removesuffix("]"))
    return "-".join([function, *(word for word in words if word not in _FLAVOURS)]), tuple(
        word for word in words if word in _FLAVOURS
    )
