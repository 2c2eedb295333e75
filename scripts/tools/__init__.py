"""What the commands in ``scripts`` start: a package or module for each, over what they share (see pyproject.toml)."""

from __future__ import annotations

from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
"""The checkout."""
