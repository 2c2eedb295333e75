"""Enumerations as pybind11 makes them: no numbers, but equal to them."""

from __future__ import annotations

from enum import Enum

__all__ = ["NumberedEnum"]


class NumberedEnum(Enum):
    """Names for numbers; a member is equal to its number, and has its hash."""

    def __eq__(self, other: object) -> bool:
        if isinstance(other, NumberedEnum):
            return type(self) is type(other) and self.value == other.value
        return bool(self.value == other)

    def __hash__(self) -> int:
        return hash(self.value)

    def __int__(self) -> int:
        return int(self.value)

    def __index__(self) -> int:
        return int(self.value)

    def __str__(self) -> str:
        return f"{type(self).__name__}.{self.name}"

    def __repr__(self) -> str:
        return f"<{type(self).__name__}.{self.name}: {self.value}>"
