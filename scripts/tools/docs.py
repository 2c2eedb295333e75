"""Build the site into site/, every warning an error; or serve it while pages are written.

MkDocs imports this file for its hooks: what pages link to outside docs/ is a page of the site, too.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from posixpath import dirname, join, normpath, relpath
from typing import Any, Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel

ROOT: Final = Path(__file__).resolve().parents[2]
DOCS: Final = "docs/"
CARRIED: Final = "repository/"
LINK: Final = re.compile(r"\]\((?P<target>[^)\s#:]+)(?P<anchor>#[^)\s]*)?\)")
LANGUAGES: Final = {".py": "python", ".c": "c", ".h": "c", ".pbtxt": "protobuf", ".yaml": "yaml", ".yml": "yaml"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what pages link to, and what that links to in turn."""
    pages = [(DOCS + file.src_uri, file.content_string) for file in files.documentation_pages()]
    carried: set[str] = set()
    while pages:
        origin, content = pages.pop()
        for target in set(_outside(origin, content)) - carried:
            carried.add(target)
            text = _page(target)
            files.append(File.generated(config, _place(target), content=text, inclusion=InclusionLevel.NOT_IN_NAV))
            pages.append((target, text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Have links lead to the pages that were added; tables of HTML may hold Markdown, as they do in the repository."""
    place = page.file.src_uri
    origin = place[len(CARRIED) :].removesuffix(".md") if place.startswith(CARRIED) else DOCS + place
    if place.startswith(CARRIED) and (ROOT / f"{origin}.md").is_file():
        origin += ".md"

    def led_on(link: re.Match[str]) -> str:
        target = _target(origin, link["target"])
        if not (ROOT / target).exists():
            return link[0]
        to = target[len(DOCS) :] if target.startswith(DOCS) else _place(target)
        return f"]({relpath(to, dirname(place) or '.')}{link['anchor'] or ''})"

    return re.sub(r"<(table|tr|th|td)\b", r'<\1 markdown="1"', LINK.sub(led_on, markdown))


def on_page_content(html: str, **_: Any) -> str:
    """Mark names in docstrings as code: they are written in Sphinx's syntax, which Markdown does not know."""
    return re.sub(r":(?:class|func|meth|mod|attr|data|exc):<code>[~.]?", "<code>", html)


def _outside(origin: str, content: str) -> Iterator[str]:
    """Yield the files and folders of the repository, outside docs/, that a page links to."""
    for link in LINK.finditer(content):
        target = _target(origin, link["target"])
        if not target.startswith(DOCS) and not target.startswith("..") and (ROOT / target).exists():
            yield target


def _target(origin: str, link: str) -> str:
    return normpath(join(dirname(origin), link))


def _place(target: str) -> str:
    return CARRIED + (target if target.endswith(".md") else f"{target}.md")


def _page(target: str) -> str:
    path = ROOT / target
    if path.is_dir():
        names = sorted(f"{each.name}/" if each.is_dir() else each.name for each in path.iterdir())
        return f"# {target}\n\n" + "\n".join(f"- {name}" for name in names if name != "__pycache__/")
    text = path.read_text()
    if path.suffix == ".md":
        return text
    return f"# {target}\n\n````{LANGUAGES.get(path.suffix, 'text')}\n{text}\n````\n"


def main() -> int:
    description = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="scripts/docs", description=description)
    parser.add_argument("--serve", metavar="HOST:PORT", help="serve the pages there, anew as they change")
    arguments = parser.parse_args()
    how = ["build", "--quiet"] if arguments.serve is None else ["serve", "--dev-addr", arguments.serve]
    # The theme warns every user about a future version of MkDocs, which is no fault of a page.
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", how[0], "--strict", *how[1:]]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
