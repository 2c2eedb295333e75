"""The pictures that the documents show are there, and those that the bench draws are shown."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts.tools.bench.pictures import PICTURES

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_IMAGE = re.compile(r"!\[[^\]]*\]\(([^)\s]+)|<img\b[^>]*\bsrc=\"([^\"]+)|<source\b[^>]*\bsrcset=\"([^\"]+)")
IMAGES = ROOT / "docs" / "images"


def images_of(document: Path) -> list[str]:
    """Return the addresses of a document's images, in Markdown or HTML, but those of other hosts."""
    found = _IMAGE.findall(document.read_text())
    return [address for groups in found for address in groups if address and "://" not in address]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: str(document.relative_to(ROOT)))
def test_every_picture_that_a_document_shows_is_there(document: Path) -> None:
    missing = [address for address in images_of(document) if not (document.parent / address).is_file()]
    assert missing == []


def test_images_are_found_however_they_are_written(tmp_path: Path) -> None:
    document = tmp_path / "page.md"
    document.write_text(
        "![a](images/a.svg)\n[![b](b.png)](there)\n"
        '<img alt="c" src="c.svg">\n<picture><source media="x" srcset="d.svg">\n'
        "![e](https://example.com/e.svg) [f](f.md)\n"
    )
    assert images_of(document) == ["images/a.svg", "b.png", "c.svg", "d.svg"]


def test_the_numbers_show_every_picture_of_the_bench_which_is_there_in_both_formats() -> None:
    assert images_of(ROOT / "docs" / "bench.md") == [f"images/{name}.svg" for name in PICTURES]
    for name in PICTURES:
        assert (IMAGES / f"{name}.png").is_file()
        assert (IMAGES / f"{name}.svg").is_file()
