"""Where the recipes are, and one server for all of them, with the stock models that they are measured beside."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from examples.measuring import recipe_models
from shm_backend_utils.cli.common.server import copy_models
from shm_backend_utils.server import EmbeddedServer

EXAMPLES: Final = Path(__file__).resolve().parents[2] / "examples"
RECIPES: Final = sorted(readme.parent.name for readme in EXAMPLES.glob("*/README.md"))


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    # A server does not start with a model that fails to load.
    runnable = [recipe for recipe in RECIPES if recipe != "pytorch" or importlib.util.find_spec("torch")]
    folder = tmp_path_factory.mktemp("examples")
    repository = folder / "models"
    for recipe in runnable:
        copy_models(recipe_models(EXAMPLES / recipe), repository)
    with EmbeddedServer.start(repository, log_file=folder / "server.log") as server:
        yield server.grpc_url
