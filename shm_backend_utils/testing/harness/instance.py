"""An instance of a model: wherever it runs, it is called in this way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from .requests import Delivery
from .stub import Receiver

__all__ = ["Instance"]


class Instance(Protocol):
    """An instance of a model: a :class:`.Stub`, or one in a child process. What it raises is :class:`.StubError`."""

    def load(self) -> None:
        """Import model.py."""

    def auto_complete(self, config: str) -> str | None:
        """Return the configuration as the model completes it, None if it does not; both are JSON."""

    def initialize(self, args: Mapping[str, str], *, is_decoupled: bool) -> None:
        """Call the model's ``initialize``."""

    def execute(self, deliveries: Sequence[Delivery], receivers: Sequence[Receiver]) -> None:
        """Call the model's ``execute``, and return when it has."""

    def is_ready(self) -> bool:
        """Return whether it lives, and the model's ``is_ready``, if it has one, returns True."""

    def finalize(self) -> None:
        """Call the model's ``finalize``, and end."""
