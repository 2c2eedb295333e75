"""A model's code, looked at without running it."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ...repository.source_files import NoSourceError, read_source

__all__ = ["ANSWERING", "MODEL_CLASS", "PACKAGE", "STREAMING", "ModelCode"]

MODEL_CLASS: Final = "TritonPythonModel"

PACKAGE: Final = __name__.partition(".")[0]
"""The name of this library's folder, wherever it is copied."""

ANSWERING: Final = ("serve", "serve_async", "serve_batch")
"""Those of a session's calls whose result ``execute`` is to return."""

STREAMING: Final = "serve_streams"
"""That of decoupled models, whose ``execute`` returns nothing."""
_MOST_NAMES: Final = 5
_NAMING: Final = {
    **{"input": (1, "input"), "find_input": (1, "input"), "put": (2, "output")},
    **dict.fromkeys(("output", "device_output"), (3, "output")),
    **dict.fromkeys(("forward", "forward_async"), (2, "model")),
}
"""Calls of a request whose first argument is a name: how many arguments they have at least, and of what it is one."""


@dataclass(frozen=True)
class ModelCode:
    """What is known of a model's code by its syntax."""

    file: Path  # with the model's class
    error: str  # why it cannot be parsed, with the line; empty if it can
    names: frozenset[str]  # all that it binds at its top; * if it takes all of another module
    mentioned: frozenset[str]  # all names and attributes in it, and in the modules beside it
    inherits: bool = False  # its class has a base, or comes from elsewhere, which may do what is not seen here
    # The lines in execute where a session serves requests and its answers go nowhere, and what is called there.
    dropped: tuple[tuple[int, str], ...] = ()
    # The lines where a call names something: "input", "output" or "model", and its literal name.
    named: tuple[tuple[int, str, str], ...] = ()

    @classmethod
    def read(cls, file: Path) -> ModelCode:
        """Read a file; OSError if it cannot be read, or one beside it."""
        try:
            tree = _parsed(file)
        except SyntaxError as error:
            return cls(file, f"{file}:{error.lineno or 1}: {error.msg}", frozenset(), frozenset())
        except (ValueError, RecursionError, MemoryError) as error:
            return cls(file, f"{file}: {str(error) or 'it is nested too deeply'}", frozenset(), frozenset())
        names = frozenset(name for node in tree.body for name in _bound_by(node))
        mentioned = frozenset[str]().union(_mentioned_in(tree), *map(_mentioned_beside, _beside(file)))
        classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == MODEL_CLASS]
        inherits = not classes or any(node.bases for node in classes)
        return cls(file, "", names, mentioned, inherits, tuple(_dropped_in(tree)), tuple(_named_in(tree)))

    def defines(self, name: str) -> bool:
        """Return whether the module has a name, as far as its syntax tells."""
        return bool({name, "*"} & self.names)

    def mentions(self, name: str) -> bool:
        """Return whether a name stands anywhere in the code, or in that of the modules beside it."""
        return name in self.mentioned


def _parsed(file: Path) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they would be printed with the line, as it is
        return ast.parse(read_source(file), str(file))


def _beside(file: Path) -> list[Path]:
    """Return the other modules that a model's code may import: in the version's folder and in the model's."""
    of_version = [each for each in file.parent.rglob("*.py") if PACKAGE not in each.relative_to(file.parent).parts]
    return sorted({*of_version, *file.parents[1].glob("*.py")} - {file})


def _mentioned_beside(file: Path) -> frozenset[str]:
    try:
        return _mentioned_in(_parsed(file))
    except (SyntaxError, ValueError, RecursionError, MemoryError, NoSourceError):  # it may never be imported
        return frozenset()


def _mentioned_in(tree: ast.AST) -> frozenset[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.alias):
            found.add(node.name.rpartition(".")[2])
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
    return frozenset(found)


def _dropped_in(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) and function.name == "execute":
            for node in ast.walk(function):
                call = node.value if isinstance(node, ast.Expr) else None
                call = call.value if isinstance(call, ast.Await) else call
                if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in ANSWERING:
                    yield call.lineno, _dotted(call.func)


def _named_in(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """Yield what calls of a request name: those of a function's last argument, or of what a ``with`` has opened."""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            nodes = [*ast.walk(function)]
            requests = [each.optional_vars for each in nodes if isinstance(each, ast.withitem)]
            names = {each.id for each in requests if isinstance(each, ast.Name)}
            names |= {each.arg for each in function.args.args[-1:]}
            for node in nodes:
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
                    owner, first = node.func.value, node.args[0]
                    least, what = _NAMING.get(node.func.attr, (0, ""))
                    is_request = isinstance(owner, ast.Name) and owner.id in names
                    name = first.value if isinstance(first, ast.Constant) else None
                    if is_request and what and isinstance(name, str) and len(node.args) + len(node.keywords) >= least:
                        yield node.lineno, what, name


def _dotted(called: ast.Attribute) -> str:
    """Return the last names of what is called: there may be more than Python's own printer can print."""
    names = [called.attr]
    node = called.value
    while isinstance(node, ast.Attribute) and len(names) < _MOST_NAMES:
        names.append(node.attr)
        node = node.value
    names.append(node.id if isinstance(node, ast.Name) else "…")
    return ".".join(reversed(names))


def _bound_by(node: ast.stmt) -> list[str]:
    """Return the names that a statement at the top of a module binds; those inside ``if`` and ``try``, too."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return [node.name]
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [alias.asname or alias.name for alias in node.names]
    return [
        name
        for each in ast.walk(node)
        for name in (
            [each.id]
            if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
            else _bound_by(each)
            if isinstance(each, ast.ClassDef | ast.Import | ast.ImportFrom)
            else []
        )
    ]
