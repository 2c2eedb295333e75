"""What a run of the bench has found, as JSON and back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from shm_backend_utils.repository.source_files import read_source

from ...figures import Figure
from ..curves import Curves
from .figure_rows import as_json, from_json
from .files import ReportError

__all__ = ["Run", "json_of", "read_run"]


class Run(NamedTuple):
    """What a run has found.

    Attributes
    ----------
    machine : mapping of str to str
        What it ran on.
    figures : list of Figure
    medians_ms : mapping
        All medians, by what was measured and by case.
    curves : Curves
        What pictures are drawn from.
    """

    machine: Mapping[str, str]
    figures: list[Figure]
    medians_ms: Mapping[str, Mapping[str, float]]
    curves: Curves


def json_of(run: Run) -> str:
    """Return a run as JSON."""
    content = {
        "machine": run.machine,
        "figures": [as_json(figure) for figure in run.figures],
        "medians_ms": run.medians_ms,
        "curves": run.curves.as_json(),
    }
    return json.dumps(content, indent=2) + "\n"


def read_run(file: Path) -> Run:
    """Read what ``--json`` has written.

    Raises
    ------
    ReportError
        It cannot be read, or is something else.
    """
    try:
        return _run_of(json.loads(read_source(file)))
    except OSError as error:
        raise ReportError(f"{file} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # of UTF-8, of JSON, of what it says
        raise ReportError(f"{file} is not what bench --json has written: {error}") from None


def _run_of(content: Any) -> Run:
    if not isinstance(content, dict):
        raise ValueError("it is no object")  # noqa: TRY004  # of a file, not of a caller
    for name, kind in {"machine": dict, "figures": list, "medians_ms": dict, "curves": list}.items():
        if not isinstance(content.get(name), kind):
            raise ValueError(f"{name!r} is missing")  # noqa: TRY004
    json.dumps(content, ensure_ascii=False).encode()  # half a surrogate pair, which JSON may have, is in no page
    machine = {str(name): str(value) for name, value in content["machine"].items()}
    figures = [from_json(figure) for figure in content["figures"]]
    return Run(machine, figures, content["medians_ms"], Curves.from_json(content["curves"]))
