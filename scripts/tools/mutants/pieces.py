"""What of a module changes by itself: its functions, one by one, and the rest."""

from __future__ import annotations

import ast
import hashlib
from dataclasses import dataclass
from typing import Final

__all__ = ["REST", "Piece", "pieces_of"]

REST: Final = ""
"""The name of what is in no function."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A function, with those inside it, or the rest of a module.

    Attributes
    ----------
    first_line, last_line : int
        Where it is.
    digest : str
        Of a function's text, wherever it is; of the rest as it is parsed, with the functions' signatures.
    """

    first_line: int
    last_line: int
    digest: str


def pieces_of(source: str) -> dict[str, Piece]:
    """Return a module's pieces by name: ``__qualname__``, the second of a name with a plus, or :data:`REST`."""
    tree = ast.parse(source)
    lines = source.splitlines()
    found: dict[str, Piece] = {}
    _take_functions(tree, "", lines, found)
    found[REST] = Piece(1, len(lines), _digest(ast.dump(tree)))
    return found


def _take_functions(scope: ast.Module | ast.ClassDef, prefix: str, lines: list[str], found: dict[str, Piece]) -> None:
    """Note the functions of a module or class, and leave of them their signatures."""
    for node in scope.body:
        if isinstance(node, ast.ClassDef):
            _take_functions(node, f"{prefix}{node.name}.", lines, found)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first_line = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            last_line = node.lineno if node.end_lineno is None else node.end_lineno
            name = f"{prefix}{node.name}"
            while name in found:  # a property's setter, for example
                name += "+"
            found[name] = Piece(first_line, last_line, _digest("\n".join(lines[first_line - 1 : last_line])))
            node.body = []
    scope.body = [node for node in scope.body if not _is_text(node)]


def _is_text(node: ast.stmt) -> bool:
    """Return whether it is a docstring."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
