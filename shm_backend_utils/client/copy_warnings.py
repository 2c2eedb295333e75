"""Warnings of tensors that are copied on their way: once for each model and reason, at the user's own line."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Final

from ..origin import Origin
from .known_model import KnownModel

__all__ = ["CopyWarning", "tell_gpu_copy", "tell_no_growth", "tell_overflow", "tell_path"]

_COPIES: Final[Mapping[str, str]] = {
    "triton-shm": "which copies its inputs once and its outputs twice",
    "inline": "which copies every tensor several times",
}

_FROM_BYTES: Final = 64 * 2**10
"""From this size on a copy takes longer than what a call takes anyway."""


class CopyWarning(UserWarning):
    """Tensors are copied that need not be; the message says why, and what to do about it.

    It comes once for each model and reason, where a call leaves the choice to the library, and from 64 KiB on: what is
    smaller is copied in no time. If that is meant, ask for the path by name, or silence the warning:
    ``warnings.simplefilter("ignore", CopyWarning)``.
    """


def tell_path(known: KnownModel, path: str, why: str, byte_size: float, origin: Origin) -> None:
    """Warn that a call does not take the direct path, though it might take any; ``why`` says what it lacks."""
    if byte_size >= _FROM_BYTES and _is_news(known, f"path {path}"):
        _warn(
            f"model {known.spec.name!r} is called on the path {path}, {_COPIES[path]}: {why}; "
            f"if that is meant, say path={path!r}",
            origin,
        )


def tell_gpu_copy(known: KnownModel, name: str, obstacle: str, origin: Origin) -> None:
    """Warn that an input is copied on its GPU, as it cannot be used where it is; ``obstacle`` says why."""
    if _is_news(known, f"input {name}: {obstacle}"):
        _warn(f"input {name!r} of model {known.spec.name!r} is copied on its GPU: {obstacle}", origin)


def tell_overflow(known: KnownModel, overflowed: Mapping[str, int], remedy: str, origin: Origin) -> None:
    """Warn that outputs found too little room in shared memory."""
    for name, byte_size in overflowed.items():
        if byte_size >= _FROM_BYTES and _is_news(known, f"output {name}"):
            _warn(
                f"output {name!r} of model {known.spec.name!r} needs {byte_size} bytes and found less room in shared "
                f"memory, so it came back through Triton, which copies it; {remedy}: outputs={{{name!r}: {byte_size}}}",
                origin,
            )


def tell_no_growth(known: KnownModel, rooms: Mapping[str, int], origin: Origin) -> None:
    """Warn that outputs of a prepared call go on to find too little room, as there is no memory to be had for them."""
    if sum(rooms.values()) >= _FROM_BYTES and _is_news(known, "no memory to grow"):
        _warn(
            f"a prepared call of model {known.spec.name!r} has too little room for {', '.join(map(repr, rooms))}, and "
            f"the pool has no {sum(rooms.values())} bytes now, so they come back through Triton, which copies them, "
            "until it has; release results sooner, raise PoolOptions(max_bytes=...), or say beforehand: "
            f"outputs={dict(rooms)}",
            origin,
        )


def _is_news(known: KnownModel, what: str) -> bool:
    if what in known.told:
        return False
    known.told.add(what)
    return True


def _warn(message: str, origin: Origin) -> None:
    warnings.warn_explicit(message, CopyWarning, origin.code.co_filename, origin.line, registry=None)
