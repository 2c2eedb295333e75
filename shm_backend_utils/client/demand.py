"""What a user asks for beside tensors."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .options import RequestOptions
from .origin import Origin
from .plan import OutputHint

__all__ = ["Demand", "Outputs"]

Outputs = Sequence[str] | Mapping[str, OutputHint] | None
"""The outputs that are wanted, with or without hints of their size; None for all."""


@dataclass(eq=False, slots=True)
class Demand:
    """One call's demand.

    Attributes
    ----------
    model : str
    path : str
        ``"auto"``, or one by name.
    deadline : float
        By ``time.monotonic()``.
    options : RequestOptions
    origin : Origin
        Where in the user's code.
    """

    model: str
    path: str
    deadline: float
    options: RequestOptions
    origin: Origin

    @property
    def version(self) -> str:
        """The model's version that is wanted; empty if the server chooses."""
        return self.options.get("model_version", "")

    @property
    def left_s(self) -> float:
        """Seconds until the deadline; always a little, so that what is ready is taken."""
        return max(self.deadline - time.monotonic(), 1e-3)
