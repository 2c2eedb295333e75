"""docs/deploy/compose: held against the Compose specification, and against what memory can be shared in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import compose_spec
import pytest
import yaml

FILE = Path(__file__).parents[2] / "docs" / "deploy" / "compose" / "compose.yaml"


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    services: dict[str, Any] = yaml.safe_load(FILE.read_text())["services"]
    return services


def test_it_is_as_the_specification_wants_it() -> None:
    compose_spec.PyCompose.from_yaml(FILE.read_text()).validate()


def test_what_is_built_is_a_stage_of_the_dockerfile(services: dict[str, Any]) -> None:
    for service in services.values():
        if "build" in service:
            context = (FILE.parent / service["build"]["context"]).resolve()
            dockerfile = context / service["build"]["dockerfile"]
            assert f" AS {service['build']['target']}\n" in dockerfile.read_text()
