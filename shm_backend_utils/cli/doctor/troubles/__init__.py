"""All troubles that the doctor knows. The page ``docs/troubleshooting.md`` has a row for each."""

from __future__ import annotations

from typing import Final

from ..findings import Trouble
from . import config, folder, machine, model, server

__all__ = ["TROUBLES"]

_PARTS: Final = {
    "The way to the server": server,
    "A model's configuration": config,
    "A model's folder": folder,
    "Between this process and a model": model,
    "This machine": machine,
}

TROUBLES: Final = {
    heading: [each for _, each in sorted(vars(part).items()) if isinstance(each, Trouble)]
    for heading, part in _PARTS.items()
}
"""By the headings of the page, each in one place."""
