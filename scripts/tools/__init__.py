"""What the commands in ``scripts`` start: a package or module for each, over what they share (see pyproject.toml).

What users run, too, is in :mod:`shm_backend_utils.cli`; its ``common`` serves the tools as well. Run from the root of
the checkout, ``python -m scripts.tools.NAME`` starts a tool without setting anything up.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
"""The checkout."""
