"""How a model repository is laid out: a folder for each model, with its configuration and a folder for each version."""

from __future__ import annotations

from pathlib import Path
from typing import Final

__all__ = ["CODE_FILE", "CONFIG_FILE", "is_model_folder", "version_folders"]

CONFIG_FILE: Final = "config.pbtxt"
CODE_FILE: Final = "model.py"
"""The code of a version, where the configuration names no other file."""


def version_folders(model: Path) -> list[Path]:
    """Return the folders of a model's versions, the oldest first; OSError if the model's folder cannot be read."""
    versions = [each for each in model.iterdir() if each.name.isdecimal() and each.is_dir()]
    return sorted(versions, key=lambda version: int(version.name))


def is_model_folder(folder: Path) -> bool:
    """Return whether a folder has a configuration, or a version with code; OSError if it cannot be read."""
    return (folder / CONFIG_FILE).exists() or any(
        (version / CODE_FILE).is_file() for version in version_folders(folder)
    )
