"""model.py as a module of its own: imported under a name that no other model's has."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from ..emulator import NAME

__all__ = ["ModelCode"]

_CLASS: Final = "TritonPythonModel"
_AFTER_IMPORT: Final = (
    "InferenceRequest",
    "InferenceResponse",
    "Logger",
    "MetricFamily",
    "PreferredMemory",
    "TRITONSERVER_MEMORY_CPU",
    "TRITONSERVER_MEMORY_GPU",
    "Tensor",
    "TritonError",
    "TritonModelException",
    "get_model_dir",
    "is_model_ready",
    "load_model",
    "unload_model",
)
"""Names that the stub puts into its module when model.py has been imported, and that no line at its top can use."""


class ModelCode:
    """A model's code, in the folder of a version, and the modules beside it that it imports.

    It gets ``backend`` for ``import triton_python_backend_utils``.
    """

    def __init__(self, file: Path, backend: ModuleType) -> None:
        self.backend = backend
        self._file = file
        self._folder = file.parent
        self._package = f"_{file.parent.parent.name}_{id(self):x}"
        self._replaced = sys.modules.get(NAME)
        self._modules: dict[str, ModuleType] = {}
        self._entries = [_Folder(self._folder), _Folder(self._folder.parent)]

    def load(self) -> Any:
        """Import it, and return its ``TritonPythonModel``."""
        names: dict[str, Any] = {
            name: vars(self.backend).pop(name) for name in _AFTER_IMPORT if name in vars(self.backend)
        }
        sys.modules[NAME] = self.backend
        first = next((place for place, each in enumerate(sys.path) if isinstance(each, _Folder)), len(sys.path))
        sys.path[first:first] = self._entries
        try:
            module = self._import()
        finally:
            vars(self.backend).update(names)
        try:
            return getattr(module, _CLASS)
        except AttributeError:
            raise AttributeError(
                f"module '{self._folder.name}.{self._file.stem}' has no attribute '{_CLASS}'"
            ) from None

    def close(self) -> None:
        """Take out of the process what importing it has put in."""
        for name in self._modules:
            sys.modules.pop(name, None)
        self._modules = {}
        sys.path[:] = [each for each in sys.path if all(each is not entry for entry in self._entries)]
        vars(self.backend)["__is_over__"] = True
        if sys.modules.get(NAME) is self.backend:
            previous = self._replaced
            while previous is not None and getattr(previous, "__is_over__", False):
                previous = getattr(previous, "__replaced__", None)
            if previous is None:
                del sys.modules[NAME]
            else:
                sys.modules[NAME] = previous

    def _import(self) -> ModuleType:
        vars(self.backend)["__replaced__"] = self._replaced
        package = ModuleType(self._package)
        package.__path__ = [str(self._folder)]
        name = f"{self._package}.{self._file.stem}"
        spec = importlib.util.spec_from_file_location(name, self._file)
        if spec is None or spec.loader is None:
            raise ImportError(f"{self._file} is no Python file")
        module = importlib.util.module_from_spec(spec)
        with self._noting_modules():
            sys.modules[self._package] = package
            sys.modules[name] = module
            spec.loader.exec_module(module)
        return module

    @contextlib.contextmanager
    def _noting_modules(self) -> Iterator[None]:
        """Keep the modules of the folder to this model: another one may have files of the same names."""
        before = set(sys.modules)
        try:
            yield
        finally:
            for name in set(sys.modules) - before:
                module = sys.modules[name]
                if name.startswith(self._package) or _is_in(self._folder.parent, module):
                    self._modules[name] = module
            for name in self._modules:
                if not name.startswith(self._package):
                    sys.modules.pop(name, None)


class _Folder(str):
    """A model's folder in ``sys.path``: behind all others, and before those of models that were loaded earlier."""

    __slots__ = ()


def _is_in(folder: Path, module: ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    return isinstance(file, str) and folder in Path(file).parents
