"""What the tests of pages start from."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .server import PagesServer


@pytest.fixture(scope="session")
def pages_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PagesServer]:
    """A server that serves the models of one page after another."""
    server = PagesServer(tmp_path_factory.mktemp("pages"))
    yield server
    server.stop()
