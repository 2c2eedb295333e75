"""A model's folder: its versions, its code and its configuration."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import ModelError
from ...repository.config import read_config
from ...repository.layout import CODE_FILE, version_folders
from .model_config import complete

__all__ = ["ModelFolder"]


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A model's folder, as the server has read it."""

    path: Path
    version: str  # the one that is served, the newest unless the policy names others
    config: Any  # as it is before the model's auto_complete_config

    @classmethod
    def read(cls, path: Path) -> ModelFolder:
        """Read what is there; ModelError, which says what to change, if the server would not load it."""
        if not path.is_dir():
            raise ModelError(f"there is no model folder {path}; expected FOLDER/config.pbtxt and FOLDER/1/model.py")
        config = read_config(path)
        version = _version(path, config)
        complete(config, path, version)
        folder = cls(path, version, config)
        if not folder.code.is_file():
            raise ModelError(f"Python model file not found in '{folder.code}'; the model's code belongs there")
        return folder

    @property
    def name(self) -> str:
        """Return the model's name."""
        return self.path.name

    @property
    def code(self) -> Path:
        """Return the file with ``TritonPythonModel``."""
        return self.path / self.version / str(self.config.default_model_filename)


def _version(path: Path, config: Any) -> str:
    versions = [int(version.name) for version in reversed(version_folders(path))]
    wanted = set(config.version_policy.specific.versions)
    served = [version for version in versions if version in wanted] if wanted else versions
    if not served:
        found = ", ".join(map(str, reversed(versions))) or "no version"
        raise ModelError(
            f"at least one version must be available under the version policy of model '{path.name}': {path} has "
            f"{found}; put the model's code into {path / '1' / CODE_FILE}"
        )
    return str(served[0])
