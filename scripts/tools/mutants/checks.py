"""The checks of a module, and the module with one of them broken."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from typing import Final

UNCHANGED: Final = -1
"""The number of no change."""

# Off by one, or the other way round.
_OTHER: Final[dict[type[ast.cmpop], type[ast.cmpop]]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
}
_CHECKING: Final = re.compile(r"_?(check|hold_owner|take|give_back|release|fcntl|fchmod|unlink|close$)")
_WAITS: Final = (ast.Yield, ast.YieldFrom, ast.Await, ast.AsyncFor, ast.AsyncWith)


@dataclass(frozen=True, slots=True)
class Mutant:
    file: str  # below the checkout
    number: int  # of the change in its file
    function: str  # where it is, as ``__qualname__`` says
    first_line: int  # what is changed
    last_line: int
    # who executes none of the lines from here to the last one cannot notice. It is a generator's first one: what is
    # recorded of that may end where an exception is thrown into another one that it waits for (Python 3.11)
    from_line: int
    change: str  # to be shown to people

    @property
    def name(self) -> tuple[str, str, str]:
        return self.file, self.function, self.change


def find(file: str, source: str) -> list[Mutant]:
    """Return all mutants of a file, in an order that depends on its source alone."""
    breaker = _Breaker(file, wanted=UNCHANGED)
    breaker.visit(ast.parse(source))
    return breaker.found


def mutate(mutant: Mutant, source: str) -> ast.Module:
    tree = ast.parse(source)
    _Breaker(mutant.file, wanted=mutant.number).visit(tree)
    return ast.fix_missing_locations(tree)


class _Breaker(ast.NodeTransformer):
    """Counts what can be changed, and does change the one that is wanted."""

    def __init__(self, file: str, wanted: int) -> None:
        self.found: list[Mutant] = []
        self._file = file
        self._wanted = wanted
        self._scopes: list[str] = []
        self._generators: list[int] = []  # their first lines

    def _scope(self, node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> ast.AST:
        waits = not isinstance(node, ast.ClassDef) and any(isinstance(part, _WAITS) for part in ast.walk(node))
        self._scopes.append(node.name)
        if waits:
            self._generators.append(node.lineno)
        self.generic_visit(node)
        if waits:
            self._generators.pop()
        self._scopes.pop()
        return node

    visit_ClassDef = visit_FunctionDef = visit_AsyncFunctionDef = _scope  # noqa: N815  # as ast has them

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        return ast.copy_location(ast.Pass(), node) if self._is_wanted(node, f"without `{_text(node)}`") else node

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        self.generic_visit(node)
        is_checking = isinstance(node.value, ast.Call) and _CHECKING.match(_name(node.value.func))
        if is_checking and self._is_wanted(node, f"without `{_text(node)}`"):
            return ast.copy_location(ast.Pass(), node)
        return node

    def visit_If(self, node: ast.If) -> ast.AST:
        """Guards: what leaves early, or does one thing more."""
        last = node.body[-1]
        is_short = len(node.body) == 1 and isinstance(last, ast.Expr) and isinstance(last.value, ast.Call)
        is_guard = not node.orelse and (is_short or isinstance(last, ast.Raise | ast.Return | ast.Continue | ast.Break))
        is_mere_raise = len(node.body) == 1 and isinstance(last, ast.Raise)  # which is dropped anyway
        if is_guard and not is_mere_raise and self._is_wanted(node.test, f"without `if {_text(node.test)}:`"):
            node.test = ast.copy_location(ast.Constant(False), node.test)
            return node
        self.generic_visit(node)
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        self.generic_visit(node)
        for index, part in enumerate(node.values):
            if self._is_wanted(part, f"`{_text(node)}` without `{_text(part)}`"):
                del node.values[index]
                return node.values[0] if len(node.values) == 1 else node
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        for index, operator in enumerate(node.ops):
            other = _OTHER.get(type(operator))
            if other is not None:
                changed = ast.Compare(node.left, [*node.ops], node.comparators)
                changed.ops[index] = other()
                if self._is_wanted(node, f"`{_text(node)}` becomes `{_text(changed)}`"):
                    return ast.copy_location(changed, node)
        return node

    def _is_wanted(self, node: ast.stmt | ast.expr, change: str) -> bool:
        number = len(self.found)
        last_line = node.lineno if node.end_lineno is None else node.end_lineno
        where = ".".join(self._scopes)
        from_line = self._generators[-1] if self._generators else node.lineno
        self.found.append(Mutant(self._file, number, where, node.lineno, last_line, from_line, change))
        return number == self._wanted


def _name(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _text(node: ast.AST) -> str:
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= 100 else f"{text[:97]}..."
