"""Where the stubs are, and which names they declare, by reading their source."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

STUBS: Final = Path(__file__).resolve().parents[2] / "stubs"
MODULES: Final = sorted(folder.name.removesuffix("-stubs") for folder in STUBS.iterdir())


def declared(module: str) -> set[str]:
    """Return the names that a module's stub declares; what is in a class is named ``Class.name``."""
    body = ast.parse((STUBS / f"{module}-stubs" / "__init__.pyi").read_text()).body
    found = set(_names_in(body, {node.name: node for node in body if isinstance(node, ast.ClassDef)}))
    for node in body:
        if isinstance(node, ast.ImportFrom) and node.module in MODULES:
            imported = {alias.name for alias in node.names}
            found |= {name for name in declared(node.module) if name.split(".")[0] in imported}
    return found


def _names_in(body: Sequence[ast.stmt], classes: Mapping[str, ast.ClassDef], owner: str = "") -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield owner + node.target.id
        elif isinstance(node, ast.FunctionDef):
            yield owner + node.name
        elif isinstance(node, ast.ClassDef):
            yield owner + node.name
            bases = [classes[base.id] for base in node.bases if isinstance(base, ast.Name) and base.id in classes]
            for each in (*bases, node):
                yield from _names_in(each.body, classes, f"{owner}{node.name}.")
