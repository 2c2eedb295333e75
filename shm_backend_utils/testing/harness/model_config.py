"""A model's configuration, completed and checked as the server does before it loads the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from google.protobuf import json_format
from tritonclient.grpc import model_config_pb2

from ...client.transports.grpc.codec import GrpcCodec
from ...dtypes import from_config
from ...errors import ModelError
from ...repository.layout import CODE_FILE, CONFIG_FILE

__all__ = ["BACKEND", "as_json", "complete", "datatype_of", "debugged", "with_auto_completed"]

BACKEND: Final = "python"
_CODEC: Final = GrpcCodec()
_AUTO_COMPLETED: Final = ("input", "output", "max_batch_size", "model_transaction_policy")
"""What a model's auto_complete_config can change, besides its batcher; the server drops the rest without a word."""


def complete(config: Any, folder: Path, version: str) -> Any:
    """Return a configuration as the server has it before ``auto_complete_config``; the given one is changed.

    The folder's name is the model's. ModelError if the server would not load it.
    """
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
    return config


def with_auto_completed(config: Any, completed: str) -> Any:
    """Return a configuration with what the model's ``auto_complete_config`` has made of it, as JSON."""
    said = json_format.ParseDict(json.loads(completed), model_config_pb2.ModelConfig())
    merged = model_config_pb2.ModelConfig()
    merged.CopyFrom(config)
    for field in _AUTO_COMPLETED:
        merged.ClearField(field)
        changed = model_config_pb2.ModelConfig()
        changed.CopyFrom(said)
        for other in changed.DESCRIPTOR.fields:
            if other.name != field:
                changed.ClearField(other.name)
        merged.MergeFrom(changed)
    if said.HasField("dynamic_batching"):
        merged.dynamic_batching.CopyFrom(said.dynamic_batching)
    _normalize(merged)
    _check(merged)
    return merged


def as_json(config: Any) -> str:
    """Return a configuration as ``initialize`` gets it: every field, also those that nobody set."""
    return json.dumps(_CODEC.told(config), separators=(",", ":"), ensure_ascii=False)


def debugged(config: Any) -> Any:
    """Return a configuration whose sessions look after outputs and inputs, unless it says whether they do."""
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
    row = from_config(values[tensor.data_type].name)
    return "" if row is None else row.name
