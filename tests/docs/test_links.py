"""Every link of a page leads to a file of the checkout, and to a heading that is there; the site has no warning."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from pymdownx.slugs import slugify

from .documents import PAGES, ROOT, name_of

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
    assert (
        set(re.findall(r"^        - (\w+)$", (ROOT / "docs" / "reference" / f"{half}.md").read_text(), re.M)) == public
    )


def test_the_site_is_built_without_a_warning() -> None:
    subprocess.run([sys.executable, "-m", "scripts.tools.docs"], cwd=ROOT, check=True)
