"""Why a model's calls take the path that they take."""

from __future__ import annotations

from dataclasses import dataclass

from .text_table import TextTable

__all__ = ["Check", "Explanation"]


@dataclass(frozen=True)
class Check:
    """One condition.

    Attributes
    ----------
    name : str
        What was asked.
    outcome : bool or None
        None if only a request can tell.
    detail : str
        What was found, and what to do where that is not as it should be.
    needed_by : tuple of str
        The paths that are closed if the outcome is False.
    is_passing : bool
        Whether the outcome may be another one at any time.
    """

    name: str
    outcome: bool | None
    detail: str
    needed_by: tuple[str, ...]
    is_passing: bool = False

    @property
    def row(self) -> tuple[str, str, str]:
        """The check in words."""
        return self.name, {True: "yes", False: "no", None: "unknown"}[self.outcome], self.detail

    def __str__(self) -> str:
        return "  ".join(self.row)


@dataclass(frozen=True, repr=False)
class Explanation:
    """Why calls of a model take the path that they take. Its text is a table for people.

    Attributes
    ----------
    model : str
    path : str or None
        Which path ``path="auto"`` takes; None if all are closed.
    reason : str
        Why not a better one.
    checks : tuple of Check
    """

    model: str
    path: str | None
    reason: str
    checks: tuple[Check, ...]

    def open(self, path: str) -> bool:
        """Return whether nothing is known to stand against a path.

        Parameters
        ----------
        path : str
            ``"direct"``, ``"triton-shm"`` or ``"inline"``.

        Returns
        -------
        bool
            True also where something could not be checked.
        """
        return not self.obstacles(path)

    def obstacles(self, path: str) -> list[Check]:
        """Return the checks that close a path.

        Parameters
        ----------
        path : str
            As of :meth:`open`.

        Returns
        -------
        list of Check
            Those that were made and failed; empty if the path is open.
        """
        return [check for check in self.checks if check.outcome is False and path in check.needed_by]

    def __repr__(self) -> str:
        return str(self._table())

    def _repr_html_(self) -> str:
        return self._table().html()

    def _table(self) -> TextTable:
        title = f"model {self.model!r} takes the path {self.path}: {self.reason}"
        return TextTable(title, [check.row for check in self.checks])
