"""What the stubs declare: names with their kinds, signatures and docstrings, by reading their source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from .described import Described, Parameter, Signature

__all__ = ["MODULES", "STUBS", "Declaration", "declarations"]

STUBS: Final = Path(__file__).resolve().parents[2] / "stubs"
MODULES: Final = sorted(folder.name.removesuffix("-stubs") for folder in STUBS.iterdir())


class Declaration(NamedTuple):
    """A name in a stub: what it stands for, and what its docstring says, or that of its class."""

    described: Described
    docstring: str | None


def declarations(module: str) -> dict[str, Declaration]:
    """Return what a module's stub declares by name; what is in a class is named ``Class.name``."""
    tree = ast.parse((STUBS / f"{module}-stubs" / "__init__.pyi").read_text())
    found = dict(_in_body(tree.body, {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}))
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module in MODULES:
            there = declarations(node.module)
            for name in [alias.asname for alias in node.names]:
                assert name is not None, "a stub exports what it imports `as`"
                found |= {inner: what for inner, what in there.items() if inner.split(".")[0] == name}
    return found


def _in_body(
    body: list[ast.stmt], classes: dict[str, ast.ClassDef], owner: str = ""
) -> Iterator[tuple[str, Declaration]]:
    functions: dict[str, list[ast.FunctionDef]] = {}
    for node, following in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and not _is_private(node.target.id):
            value = node.value.value if isinstance(node.value, ast.Constant) else None
            assert value is None or isinstance(value, int)
            yield owner + node.target.id, Declaration(Described("value", value=value), _text(following))
        elif isinstance(node, ast.FunctionDef):
            functions.setdefault(node.name, []).append(node)
        elif isinstance(node, ast.ClassDef) and not _is_private(node.name):
            yield owner + node.name, Declaration(Described("class"), ast.get_docstring(node))
            for base in node.bases:
                if isinstance(base, ast.Name) and base.id in classes:
                    yield from _in_body(classes[base.id].body, classes, f"{owner}{node.name}.")
            yield from _in_body(node.body, classes, f"{owner}{node.name}.")
    for name, overloads in functions.items():
        yield owner + name, _function(overloads)


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _text(node: ast.stmt | None) -> str | None:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return node.value.value
    return None


def _function(overloads: list[ast.FunctionDef]) -> Declaration:
    docstring = ast.get_docstring(overloads[0])
    decorators = [ast.unparse(decorator) for decorator in overloads[0].decorator_list]
    if "property" in decorators:
        return Declaration(Described("property"), docstring)
    variants = [_parameters(overload, is_bound="staticmethod" not in decorators) for overload in overloads]
    defaults = {name: default for variant in variants for name, default, _ in variant if default is not None}
    longest = max(reversed(variants), key=len)  # the last one is the most general
    parameters = tuple(Parameter(name, defaults.get(name), type_) for name, _, type_ in longest)
    returns = {ast.unparse(overload.returns) for overload in overloads if overload.returns is not None}
    return Declaration(
        Described("function", Signature(parameters, _last_word(returns.pop()) if len(returns) == 1 else None)),
        docstring,
    )


def _parameters(function: ast.FunctionDef, *, is_bound: bool) -> list[Parameter]:
    arguments = function.args
    assert arguments.vararg is None
    assert arguments.kwarg is None
    by_position = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(by_position) - len(arguments.defaults)) + arguments.defaults
    pairs = [*zip(by_position, defaults, strict=True), *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    if is_bound and pairs and pairs[0][0].arg == "self":
        pairs.pop(0)
    return [
        Parameter(
            None if argument in arguments.posonlyargs else argument.arg,
            None if default is None else ast.unparse(default),
            None if argument.annotation is None else _last_word(ast.unparse(argument.annotation)),
        )
        for argument, default in pairs
    ]


def _last_word(annotation: str) -> str:
    """Return a type as a report says it: without ``| None``, a list for any sequence, and without a module."""
    return annotation.removesuffix(" | None").replace("Sequence[", "list[").rpartition(".")[2].lstrip("_")
