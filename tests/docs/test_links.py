"""Every link of a page leads somewhere, and the site has no warning; each block of code is what it says it is."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from google.protobuf import text_format
from pymdownx.slugs import slugify
from tritonclient.grpc import model_config_pb2

from .commands import complaints
from .documents import PAGES, ROOT, Block, blocks, name_of

LINK = re.compile(r"\]\((?P<target>[^)\s#]*)(?:#(?P<anchor>[^)\s]*))?\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
BLOCK = re.compile(r"^ *(```+).*?^ *\1$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]*`")
slug = slugify(case="lower")


def prose(page: Path) -> str:
    return BLOCK.sub("", page.read_text())


def anchors(page: Path) -> set[str]:
    """Return the names that the headings of a page have, in a repository's view and on the site."""
    return {slug(heading.replace("`", ""), "-") for heading in HEADING.findall(prose(page))}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for link in LINK.finditer(CODE.sub("", prose(page))):
        if "://" in link["target"]:
            continue
        target = page if not link["target"] else (page.parent / link["target"]).resolve()
        there = target.exists() and target.is_relative_to(ROOT)
        if not there or (link["anchor"] and link["anchor"] not in anchors(target)):
            broken.append(link[0][1:])
    assert broken == []


def test_the_readme_leads_to_the_index_and_that_to_every_page() -> None:
    assert "(docs/index.md)" in (ROOT / "README.md").read_text()
    linked = (ROOT / "docs" / "index.md").read_text() + "(index.md)"
    pages = {*ROOT.glob("docs/howto/*.md"), *ROOT.glob("docs/*.md")}
    assert [page for page in pages if f"({page.relative_to(ROOT / 'docs')})" not in linked] == []


@pytest.mark.parametrize("half", ["client", "model"])
def test_the_reference_has_every_name_of_a_half_but_its_errors(half: str) -> None:
    public = {name for name in import_module(f"shm_backend_utils.{half}").__all__ if not name.endswith("Error")}
    page = (ROOT / "docs" / "reference" / f"{half}.md").read_text()
    assert {*re.findall(r"\w+", page.partition("members: [")[2].partition("]")[0])} == public


def test_the_site_is_built_without_a_warning() -> None:
    subprocess.run([sys.executable, "-m", "scripts.tools.docs"], cwd=ROOT, check=True)


BLOCKS: Final = [block for page in PAGES for block in blocks(page)]


def read_shell(code: str) -> None:
    found = complaints(code)
    assert not found, "; ".join(found)


def read_session(code: str) -> None:
    """Look at what was typed in a terminal: the lines with a prompt, and not what they print."""
    read_shell("".join(line[2:] for line in code.splitlines(keepends=True) if line.startswith("$ ")))


def read_configuration(code: str) -> None:
    text_format.Parse(code, model_config_pb2.ModelConfig())


def read_dockerfile(code: str) -> None:
    instructions = [line.split()[0] for line in code.replace("\\\n", "").splitlines() if line and line[0] != "#"]
    assert instructions[0] in ("FROM", "ARG")


READ: Final[dict[str, Callable[[str], Any]]] = {
    "python": ast.parse,
    "sh": read_shell,
    "console": read_session,
    "protobuf": read_configuration,
    "json": json.loads,
    "yaml": lambda code: list(yaml.safe_load_all(code)),
    "promql": str,  # tests/unit/test_metrics.py looks at queries
    "dockerfile": read_dockerfile,
    "text": str,
}
BY_A_TEST_ALONE: Final = ("http", "hex", "c", "promql")
"""What only a test of the page's own can read."""


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_block_can_be_read_as_what_it_is_written_in(block: Block) -> None:
    assert block.language in {*READ, *BY_A_TEST_ALONE}, f"{block}: a block in {block.language or 'no language'}"
    if block.language in READ:
        READ[block.language](block.code)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_what_is_not_run_here_is_run_elsewhere_or_has_a_reason(page: Path) -> None:
    for block in blocks(page):
        if block.mark == "run by":
            assert (ROOT / block.said).is_file(), block
        elif block.mark is None:
            assert block.language not in BY_A_TEST_ALONE, f"{block}: which test runs it?"
        elif block.mark != "prints":
            assert block.said, block
