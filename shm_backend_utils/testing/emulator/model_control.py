"""Models that a model loads and unloads."""

from __future__ import annotations

from collections.abc import Mapping

from .arguments import refuse, text, truth
from .asked import asked
from .errors import TritonModelException
from .host import Host

__all__ = ["ModelControl"]


class ModelControl:
    """What a model can do about the other models of its server."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def load_model(self, model_name: str, config: str = "", files: Mapping[str, bytes] | None = None) -> None:
        """Load a model, where the server lets models be controlled; from Triton 23.07 on.

        ``config`` is JSON, instead of that of its folder; ``files`` stand for its folder, by ``"file:..."``.
        TritonModelException if the server refuses it, or the files are no dict.
        """
        name = text("load_model", "model_name", model_name)
        config = text("load_model", "config", config)
        if files is not None and not isinstance(files, dict):
            raise TritonModelException(
                f"failed to load model '{name}', files should be a dictionary of file paths and file contents"
            )
        contents = {}
        for path, content in (files or {}).items():
            if not isinstance(path, str | bytes):
                raise RuntimeError(f"Unable to cast Python instance to C++ type: the file {path!r} is named by no str")  # noqa: TRY004  # as the stub does
            if not isinstance(content, bytes):
                refuse("load_model", "files", content, "bytes")
            contents[text("load_model", "files", path)] = content
        asked(self._host, "Failed to load model", lambda: self._host.load_model(name, config, contents))

    def unload_model(self, model_name: str, unload_dependents: bool = False) -> None:
        """Unload a model, and maybe those that it depends on; from Triton 23.07 on.

        TritonModelException if the server refuses it.
        """
        name = text("unload_model", "model_name", model_name)
        with_dependents = truth("unload_model", "unload_dependents", unload_dependents)
        asked(
            self._host, "Failed to unload model", lambda: self._host.unload_model(name, with_dependents=with_dependents)
        )

    def is_model_ready(self, model_name: str, model_version: str = "") -> bool:
        """Return whether a model can execute requests; from Triton 23.07 on.

        TritonModelException if the version is no number, or there is no such model.
        """
        name = text("is_model_ready", "model_name", model_name)
        version = text("is_model_ready", "model_version", model_version)
        return asked(
            self._host, "Failed to check model readiness", lambda: self._host.is_model_ready(name, _checked(version))
        )


def _checked(version: str) -> str:
    """Return a version; C++ reads the number that it begins with."""
    if not version:
        return version
    digits = version.strip()
    sign = digits[:1] in ("+", "-")
    end = next((i for i, c in enumerate(digits) if not (c.isdigit() or (i == 0 and sign))), len(digits))
    try:
        number = int(digits[:end])
    except ValueError:
        raise TritonModelException(
            f"failed to get model version from specified version string '{version}' (details: stol), version should be "
            "an integral value > 0"
        ) from None
    if number < 0:
        raise TritonModelException(
            f"failed to get model version from specified version string '{version}', version should be an integral "
            "value > 0"
        )
    return str(number)
