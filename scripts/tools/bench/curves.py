"""What the pictures are drawn from: the points of lines, each of a panel of a picture, as a run measured them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

__all__ = ["Curve", "Curves"]

_NONSENSE: Final = 2.0**63


class Curve(NamedTuple):
    """One line.

    Attributes
    ----------
    picture : str
        The group that measured it.
    panel : str
        Which part of the picture it is in, such as ``"grpc"``.
    line : str
        What was measured.
    points : dict of int to float
        By bytes, or by threads or tasks: milliseconds, or calls per second.
    """

    picture: str
    panel: str
    line: str
    points: dict[int, float]


class Curves:
    """All lines of a run, in the order in which they were measured first."""

    def __init__(self) -> None:
        self._curves: dict[tuple[str, str, str], Curve] = {}

    def add(self, picture: str, panel: str, line: str, x: int, y: float) -> None:
        """Keep a point.

        Parameters
        ----------
        picture, panel, line : str
            Where it belongs: as of :class:`Curve`.
        x : int
            Bytes, or threads or tasks; above 0.
        y : float
            Milliseconds, or calls per second.
        """
        key = picture, panel, line
        self._curves.setdefault(key, Curve(*key, {})).points[x] = y

    def of(self, picture: str) -> dict[str, dict[str, dict[int, float]]]:
        """Return a picture's points, by panel and line."""
        panels: dict[str, dict[str, dict[int, float]]] = {}
        for curve in self:
            if curve.picture == picture:
                panels.setdefault(curve.panel, {})[curve.line] = curve.points
        return panels

    def __iter__(self) -> Iterator[Curve]:
        return iter(self._curves.values())

    def as_json(self) -> list[dict[str, Any]]:
        """Return them in JSON's types."""
        return [{**curve._asdict(), "points": list(map(list, curve.points.items()))} for curve in self]

    @classmethod
    def from_json(cls, given: object) -> Curves:
        """Return what :meth:`as_json` has written.

        Raises
        ------
        ValueError
            It was something else.
        """
        curves = cls()
        if not isinstance(given, list):
            raise ValueError("'curves' is not a list")  # noqa: TRY004  # of a file, not of a caller
        for each in given:
            if not _is_curve(each):
                raise ValueError(f"one of 'curves' is not a line with points above 0: {str(each)[:60]}")
            for x, y in each["points"]:
                curves.add(each["picture"], each["panel"], each["line"], x, y)
        return curves


def _is_curve(given: object) -> bool:
    return (
        isinstance(given, Mapping)
        and all(isinstance(given.get(name), str) for name in ("picture", "panel", "line"))
        and isinstance(given.get("points"), list)
        and all(_is_point(point) for point in given["points"])
    )


def _is_point(given: object) -> bool:
    """Return whether it is one, of numbers that have a logarithm."""
    return (
        isinstance(given, list)
        and len(given) == 2
        and isinstance(given[0], int)
        and isinstance(given[1], int | float)
        and all(0 < number < _NONSENSE for number in given)  # JSON may have more than a float can hold, and NaN
    )
