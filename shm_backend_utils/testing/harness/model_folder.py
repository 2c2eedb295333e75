"""A model's folder: its versions, its code as a module of its own, and its configuration as the server completes it."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from google.protobuf import json_format
from google.protobuf.field_mask_pb2 import FieldMask
from tritonclient.grpc import model_config_pb2

from ...client.transports.grpc.codec import GrpcCodec
from ...dtypes import BY_CONFIG
from ...errors import ModelError
from ...repository.config import read_config
from ...repository.files import CODE_FILE, CONFIG_FILE, version_folders
from ..emulator import NAME

__all__ = [
    "BACKEND",
    "ModelCode",
    "ModelFolder",
    "as_json",
    "datatype_of",
    "debugged",
    "with_auto_completed",
]

BACKEND: Final = "python"
_CODEC: Final = GrpcCodec()
_AUTO_COMPLETED: Final = ("input", "output", "max_batch_size", "model_transaction_policy")
"""Fields that auto_complete_config can change, besides the batcher; the server silently drops the rest."""

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
"""Names that the stub adds to its module after importing model.py, so module-level code there cannot use them."""


def _complete(config: Any, folder: Path, version: str) -> None:
    """Complete a configuration as the server does before ``auto_complete_config``."""
    name = folder.name
    config.name = config.name or name
    if config.name != name:
        raise ModelError(
            f"{folder / CONFIG_FILE}: unexpected directory name '{name}' for model '{config.name}', directory name "
            "must equal model name; rename one of them, or leave name out"
        )
    if not config.backend and not config.platform and (folder / version / CODE_FILE).exists():
        config.backend = BACKEND
    if config.backend == BACKEND and not config.default_model_filename:
        config.default_model_filename = CODE_FILE
    if config.backend != BACKEND:
        found = f"backend {config.backend!r}" if config.backend else f"platform {config.platform!r}"
        raise ModelError(
            f'model {name!r} has {found}; the harness runs models of the Python backend: backend: "python" in '
            f"{CONFIG_FILE}, or a file {version}/{CODE_FILE} alone"
        )
    _normalize(config)
    _name_instances(config)
    _check(config)


def with_auto_completed(config: Any, completed: str) -> Any:
    """Return a configuration that the model's ``auto_complete_config`` has completed, as JSON."""
    more = json_format.ParseDict(json.loads(completed), model_config_pb2.ModelConfig())
    merged = model_config_pb2.ModelConfig()
    merged.CopyFrom(config)
    FieldMask(paths=_AUTO_COMPLETED).MergeMessage(more, merged, replace_message_field=True, replace_repeated_field=True)
    if more.HasField("dynamic_batching"):
        merged.dynamic_batching.CopyFrom(more.dynamic_batching)
    _normalize(merged)
    _check(merged)
    return merged


def as_json(config: Any) -> str:
    """Return a configuration as ``initialize`` gets it: every field, also those that were not set."""
    return json.dumps(_CODEC.as_dict(config), separators=(",", ":"), ensure_ascii=False)


def debugged(config: Any) -> Any:
    """Return a configuration with ``SHM_DEBUG`` on, unless it sets this parameter itself."""
    if "SHM_DEBUG" in config.parameters:
        return config
    changed = model_config_pb2.ModelConfig()
    changed.CopyFrom(config)
    changed.parameters["SHM_DEBUG"].string_value = "true"
    return changed


def _normalize(config: Any) -> None:
    if not config.HasField("version_policy"):
        config.version_policy.latest.num_versions = 1
    preferring = [config.dynamic_batching] if config.HasField("dynamic_batching") else []
    if config.HasField("sequence_batching"):
        sequences = config.sequence_batching
        sequences.max_sequence_idle_microseconds = sequences.max_sequence_idle_microseconds or 1_000_000
        if sequences.HasField("oldest"):
            preferring.append(sequences.oldest)
    for batcher in preferring:
        if not batcher.preferred_batch_size and config.max_batch_size > 0:
            batcher.preferred_batch_size.append(config.max_batch_size)
    for pinned in ("input_pinned_memory", "output_pinned_memory"):
        if not config.optimization.HasField(pinned):
            getattr(config.optimization, pinned).enable = True


def _name_instances(config: Any) -> None:
    kinds = model_config_pb2.ModelInstanceGroup
    if not config.instance_group:
        config.instance_group.add(name=config.name, kind=kinds.KIND_CPU, count=1)
    for number, group in enumerate(config.instance_group):
        group.name = group.name or f"{config.name}_{number}"
        group.count = max(group.count, 1)
        if group.kind == kinds.KIND_AUTO:
            group.kind = kinds.KIND_CPU
        if group.kind == kinds.KIND_GPU:
            raise ModelError(
                f"instance group {group.name} of model {config.name} has kind KIND_GPU but no GPUs are available; the "
                "harness has none: write instance_group [ { kind: KIND_CPU } ]"
            )


def _check(config: Any) -> None:
    if config.max_batch_size < 0:
        raise ModelError(f"'max_batch_size' must be non-negative value for {config.name}; 0 is for no batches")
    for what, batcher in (
        ("dynamic batching preferred size", config.dynamic_batching),
        ("sequence batching preferred batch size", config.sequence_batching.oldest),
    ):
        for size in batcher.preferred_batch_size:
            if size <= 0:
                raise ModelError(f"{what} must be positive for {config.name}")
            if size > config.max_batch_size:
                raise ModelError(
                    f"{what} must be <= max batch size for {config.name}: {size} is more than {config.max_batch_size}"
                )


def datatype_of(tensor: Any) -> str:
    """Return the data type of a declared input or output as requests name it, ``"FP32"``; empty if it has none."""
    values = type(tensor).DESCRIPTOR.fields_by_name["data_type"].enum_type.values_by_number
    row = BY_CONFIG.get(values[tensor.data_type].name)
    return "" if row is None else row.name


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A model's folder, as the server has read it."""

    path: Path
    version: str  # the one that is served, the newest unless the policy names others
    config: Any  # as it is before the model's auto_complete_config

    @classmethod
    def read(cls, path: Path) -> ModelFolder:
        """Read the folder; ModelError, with the remedy, if the server would not load it."""
        if not path.is_dir():
            raise ModelError(f"there is no model folder {path}; expected FOLDER/config.pbtxt and FOLDER/1/model.py")
        config = read_config(path)
        version = _version(path, config)
        _complete(config, path, version)
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


class ModelCode:
    """A model's code, with ``backend`` for ``triton_python_backend_utils``, and the modules beside it."""

    def __init__(self, file: Path, backend: ModuleType) -> None:
        self.backend = backend
        self._file = file
        self._folder = file.parent
        self._package = f"_{file.parent.parent.name}_{id(self):x}"
        self._replaced = sys.modules.get(NAME)
        self._modules: dict[str, ModuleType] = {}
        self._entries = [_Folder(self._folder), _Folder(self._folder.parent)]

    def load(self) -> Any:
        """Import the code, and return its ``TritonPythonModel``."""
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
        """Remove its modules and paths from the process."""
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
            raise ImportError(f"{self._file} is not a Python file")
        module = importlib.util.module_from_spec(spec)
        with self._noting_modules():
            sys.modules[self._package] = package
            sys.modules[name] = module
            spec.loader.exec_module(module)
        return module

    @contextlib.contextmanager
    def _noting_modules(self) -> Iterator[None]:
        """Keep the folder's modules private to this model, as another one may have files of the same names."""
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
