"""A server's answers in JSON."""

from __future__ import annotations

import json
from typing import Any

from .whole_answers import fetch

__all__ = ["fetch_json"]


def fetch_json(url: str, timeout_s: float) -> Any:
    """Ask by GET and return the answer in JSON's types.

    The parameters and errors are those of :func:`.fetch`; a ValueError also says that the answer is no JSON.
    """
    return json.loads(fetch(url, timeout_s))
