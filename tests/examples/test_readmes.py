"""What the recipes' READMEs say is so."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from .recipes import EXAMPLES, RECIPES

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
    assert len(said) == 2
    assert said == {file: lines_of(file) for file in said}


@pytest.mark.parametrize("recipe", RECIPES)
def test_its_commands_name_what_is_there(recipe: str) -> None:
    readme = (EXAMPLES / recipe / "README.md").read_text()
    files = re.findall(r"\bexamples/[\w/.]+", readme)
    modules = [name.replace(".", "/") + ".py" for name in re.findall(r"-m (examples[\w.]+)", readme)]
    assert f"examples/{recipe}/measure.py" in modules
    assert f"examples/{recipe}/model_repository" in files
    assert [name for name in files + modules if not (ROOT / name).exists()] == []


def test_the_projects_readme_lists_every_recipe() -> None:
    listed = re.findall(r"\]\(examples/(\w+)/README.md\)", (ROOT / "README.md").read_text())
    assert sorted(listed) == RECIPES
