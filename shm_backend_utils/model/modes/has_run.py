"""Functions of ``model.py`` that are of another mode than the one that serves them."""

from __future__ import annotations

from collections.abc import Coroutine, Generator

from ...errors import ModelError

__all__ = ["check_has_run"]


def check_has_run(returned: object) -> None:
    """Raise ModelError for what a function returns whose body has not begun: a generator, or a coroutine."""
    if isinstance(returned, Generator):
        raise ModelError("the function yields, so nothing of it ran; generators are for serve_streams")
    if isinstance(returned, Coroutine):
        returned.close()
        raise ModelError("the function is async, so nothing of it ran; async functions are for serve_async")
