"""What belongs to the process that made it, and says so to who would send it to another."""

from __future__ import annotations

from typing import NoReturn

__all__ = ["OfThisProcess"]


class OfThisProcess:
    """Cannot be pickled: neither connections nor memory go with it."""

    __slots__ = ()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} objects cannot be pickled: they belong to the process that made them; make a "
            "client in each process"
        )
