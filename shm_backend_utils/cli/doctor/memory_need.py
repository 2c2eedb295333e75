"""How much shared memory calls of a model take at full size, and whether there is as much."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from ...memory.kinds import RegionKind
from ...memory.machine_memory import available_bytes
from ...memory.shared_file import free_bytes, total_bytes
from ...model_spec import ModelSpec
from .checkup import Checkup
from .findings import Finding
from .instances import instances_of
from .troubles.model import MODEL_SMALL_SHM

__all__ = ["MemoryNeed", "examine_memory_need", "memory_need_of"]

_MIB: Final = 2**20
_NONSENSE: Final = 2**63


class MemoryNeed(NamedTuple):
    """What a model's calls need.

    Attributes
    ----------
    call_bytes : int
        Of one call with the largest batch: all inputs and outputs whose sizes the configuration tells.
    slots : int
        How many calls are to be in memory at once: one for each instance, and one that is being filled.
    open_sizes : tuple of str
        Tensors whose sizes only a call tells; they are not counted.
    """

    call_bytes: int
    slots: int
    open_sizes: tuple[str, ...]

    @property
    def total_bytes(self) -> int:
        """Of all slots together."""
        return self.call_bytes * self.slots


def memory_need_of(spec: ModelSpec, config: Mapping[str, Any]) -> MemoryNeed:
    """Return what calls of a model need, as its configuration tells."""
    tensors = [*spec.inputs.values(), *spec.outputs.values()]
    rows = max(spec.max_batch_size, 1)
    call_bytes = sum((tensor.row_byte_size or 0) * rows for tensor in tensors)
    open_sizes = tuple(tensor.name for tensor in tensors if tensor.row_byte_size is None)
    return MemoryNeed(call_bytes, instances_of(config) + 1, open_sizes)


def examine_memory_need(checkup: Checkup, spec: ModelSpec, config: Mapping[str, Any], kind: RegionKind) -> None:
    """Compare what a model's calls need with what this process can get of the memory that the model opens.

    Parameters
    ----------
    checkup : Checkup
        For what is found.
    spec, config : ModelSpec and mapping
        The model's configuration, read and as the server has it.
    kind : RegionKind
        What memory the model could open.
    """
    need = memory_need_of(spec, config)
    free, where = available_bytes(), "memory that this process may still take"
    if kind is RegionKind.SYSTEM:
        in_shm = free_bytes()
        if in_shm < free:
            free, where = in_shm, f"/dev/shm, which has {_size(total_bytes())}"
    line = _in_words(need)
    line += f"; free: {'no limit known' if math.isinf(free) else _size(free)} of {where}"
    if need.total_bytes > free:
        checkup.add_findings(Finding(MODEL_SMALL_SHM, line, spec.name))
    else:
        checkup.add_fine(line, spec.name)


def _in_words(need: MemoryNeed) -> str:
    open_sizes = ", ".join(need.open_sizes)
    if not need.total_bytes:
        return f"only calls tell what they take: the configuration leaves open how large {open_sizes} are"
    said = f"{need.slots} calls at full size take {_size(need.total_bytes)}"
    return f"{said}, and more: the configuration leaves open how large {open_sizes} are" if open_sizes else said


def _size(byte_size: float) -> str:
    if byte_size < _MIB:
        return f"{byte_size:,.0f} bytes"
    return f"{byte_size / _MIB:,.1f} MiB" if byte_size < _NONSENSE else "more than any machine has"
