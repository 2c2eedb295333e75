"""Which parts of the package the model half stands on: found in its imports, so that nobody keeps a list."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

__all__ = ["parts_of_model_half"]

_MODEL_HALF: Final = "model"


def parts_of_model_half(package: Path) -> list[Path]:
    """Return the modules and packages at the top of the package that the model half imports, itself among them.

    A part is taken whole: also what only the client half needs of the pool, as parts are small and stand together.

    Parameters
    ----------
    package : pathlib.Path
        The folder of the package.
    """
    found: dict[str, Path] = {}
    waiting = [_MODEL_HALF]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name] = _path_of(package, name)
            waiting += _parts_imported(package, found[name])
    return [found[name] for name in sorted(found)]


def _path_of(package: Path, name: str) -> Path:
    folder = package / name
    return folder if folder.is_dir() else folder.with_suffix(".py")


def _parts_imported(package: Path, part: Path) -> set[str]:
    files = sorted(part.rglob("*.py")) if part.is_dir() else [part]
    names = {module.partition(".")[0] for file in files for module in _modules_imported(file, package)}
    return {name for name in names if name and _path_of(package, name).exists()}


def _modules_imported(file: Path, package: Path) -> Iterator[str]:
    """Yield what a file imports of the package, as names within the package; names in modules may be among them."""
    home = file.relative_to(package).parent.parts
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Import):
            inside = f"{package.name}."
            yield from (alias.name.removeprefix(inside) for alias in node.names if alias.name.startswith(inside))
        elif isinstance(node, ast.ImportFrom):
            origin = node.module.split(".") if node.module else []
            if node.level:
                above = len(home) - (node.level - 1)
                origin = [package.name, *home[:above], *origin]
            if origin[:1] == [package.name]:
                yield from (".".join([*origin[1:], alias.name]) for alias in node.names)
