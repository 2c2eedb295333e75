"""A name of a module and what there is to compare of it, whoever describes it."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Described", "Parameter", "Signature"]


class Parameter(NamedTuple):
    """A parameter: its name, None if it has none that a caller may use; its default's text; the last word of its type.

    A default that has no literal is ``...``. A type is None where nothing is said that could be compared.
    """

    name: str | None
    default: str | None
    type: str | None


class Signature(NamedTuple):
    """Parameters, without ``self``, and the type that comes back."""

    parameters: tuple[Parameter, ...]
    returns: str | None


class Described(NamedTuple):
    """What is behind a name; the value is that of a number."""

    kind: str
    signature: Signature | None = None
    value: int | None = None
