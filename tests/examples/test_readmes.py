"""What the recipes' READMEs say is so."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from .conftest import EXAMPLES, RECIPES

ROOT = EXAMPLES.parent


def lines_of(file: Path) -> int:
    """Return how many lines a file has; of a notebook, those of code."""
    if file.suffix != ".ipynb":
        return len(file.read_text().splitlines())
    cells = json.loads(file.read_text())["cells"]
    return sum(len(cell["source"]) for cell in cells if cell["cell_type"] == "code")


@pytest.mark.parametrize("recipe", RECIPES)
def test_files_have_as_many_lines_as_it_says(recipe: str) -> None:
    readme = (EXAMPLES / recipe / "README.md").read_text()
    said = {
        EXAMPLES / recipe / file: int(lines)
        for file, lines in re.findall(r"^\| \[.*?\]\((.*?)\) \| (\d+) \|$", readme, re.M)
    }
    (stock,) = (EXAMPLES / recipe / "stock").glob("*/1/model.py")
    assert len(said) == 3
    assert stock in said
    assert said == {file: lines_of(file) for file in said}


def test_the_index_lists_every_recipe() -> None:
    listed = re.findall(r"\]\(\.\./examples/(\w+)/README.md\)", (ROOT / "docs" / "index.md").read_text())
    assert sorted(listed) == RECIPES


def test_the_page_on_migrating_shows_every_recipes_model_before_and_after() -> None:
    page = (ROOT / "docs" / "migrating.md").read_text()
    linked = {(ROOT / "docs" / link).resolve() for link in re.findall(r"\]\((\.\./examples/.*?)\)", page)}
    models = {model for kind in ("model_repository", "stock") for model in EXAMPLES.glob(f"*/{kind}/*/1/model.py")}
    assert linked == models | {EXAMPLES / recipe / "README.md" for recipe in RECIPES}
