"""What a model's author should know at load: the model works, and yet not as he will expect."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ..dtypes import BYTES
from ..model_spec import PATHS_PARAMETER, ModelSpec

__all__ = ["advice"]


def advice(spec: ModelSpec, config: Mapping[str, Any], *, stub_reads_numpy: bool) -> Iterator[str]:
    """Yield lines for the server's log: what keeps clients from a model, what is never batched, what strings will do.

    ``stub_reads_numpy`` is whether Triton's stub was built for the NumPy that the model has.
    """
    if spec.paths is None:
        yield (
            f"no client shares memory with model {spec.name!r}, though it makes a ShmSession: add to its config.pbtxt: "
            f'parameters {{ key: "{PATHS_PARAMETER}" value: {{ string_value: "direct,triton-shm,inline" }} }}'
        )
        obstacle = spec.obstacle_in_inputs()
        if obstacle is not None:
            yield f"the same goes for this: {obstacle}"
    ragged = {tensor["name"] for tensor in config.get("input", ()) if tensor.get("allow_ragged_batch")}
    varying = [name for name, tensor in spec.inputs.items() if -1 in tensor.shape[1:] and name not in ragged]
    if "dynamic_batching" in config and varying and spec.paths != frozenset({"direct"}):
        yield (
            f"model {spec.name!r} has inputs of varying size ({', '.join(varying)}): in band, Triton batches no "
            "requests in which these differ, and executes each alone, unlike on the direct path; where they do differ, "
            "add `allow_ragged_batch: true` to these inputs in its config.pbtxt"
        )
    if not stub_reads_numpy:
        strings = [name for each in (spec.inputs, spec.outputs) for name, t in each.items() if t.dtype is BYTES]
        if strings:
            yield (
                f"Triton's stub was built for NumPy 1, and model {spec.name!r} has NumPy {np.__version__}: a request "
                f"that carries strings ({', '.join(strings)}) itself ends this instance's process; those on the direct "
                "path are not affected; install numpy<2 for the model, or use a newer Triton"
            )
