"""Model folders that tests write."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Final

__all__ = ["TENSORS", "folder_of"]

TENSORS: Final = """
input [ { name: "X" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ -1 ] } ]
"""


def folder_of(parent: Path, code: str, config: str | None = f'backend: "python"\n{TENSORS}', name: str = "m") -> Path:
    """Write a model, and return its folder; without a configuration if it is None."""
    folder = parent / name
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").write_text(textwrap.dedent(code))
    if config is not None:
        (folder / "config.pbtxt").write_text(config)
    return folder
