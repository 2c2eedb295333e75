"""How tensors on GPUs are laid out: which memory each is in, and how much each GPU must give."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.client.inputs.descriptions import (
    InputDescription,
    OutputHint,
    described_inputs,
    hinted_sizes,
    output_devices,
)
from shm_backend_utils.errors import TensorError, TensorNameError
from shm_backend_utils.model_spec import ModelSpec
from shm_backend_utils.protocol.call_layout import CallInput, CallLayout, lay_out
from shm_backend_utils.protocol.spans import InputSpan, OutputSpan

FP32 = np.float32
LEAST = 256
BEGIN = 8192
"""Where the data of the region begins."""


def tensor(name: str, dtype: str = "FP32", dims: Sequence[int] = (-1,)) -> dict[str, Any]:
    return {"name": name, "data_type": f"TYPE_{dtype}", "dims": dims, "optional": True}


SPEC = ModelSpec.from_config(
    {
        "name": "m",
        "input": [tensor("A"), tensor("B"), tensor("C", "UINT8"), tensor("TEXT", "STRING")],
        "output": [tensor("X"), tensor("Y", dims=[5]), tensor("WORDS", "STRING")],
    }
)
BATCHED = ModelSpec.from_config(
    {"name": "b", "max_batch_size": 8, "input": [tensor("A", dims=[3])], "output": [tensor("X", dims=[4])]}
)


def laid_out(
    inputs: Mapping[str, InputDescription],
    outputs: Mapping[str, OutputHint] | Sequence[str] = (),
    learned: Mapping[str, int] | None = None,
    spec: ModelSpec = SPEC,
) -> CallLayout:
    return lay_out(
        spec,
        described_inputs(inputs),
        hinted_sizes(outputs),
        BEGIN,
        learned=learned or {},
        most_rows=spec.max_batch_size,
        output_devices=output_devices(outputs),
    )


def places(made: CallLayout) -> dict[str, tuple[int, int, int]]:
    """Return where every tensor is: region, offset (on the host, from where data begin) and byte size."""
    spans: dict[str, InputSpan | OutputSpan] = {**made.table.inputs, **made.table.outputs}
    return {
        name: (span.region, span.offset - (0 if span.region else BEGIN), span.byte_size) for name, span in spans.items()
    }


def device_of(name: str, device: Any) -> int | None:
    return described_inputs({name: ((1,), FP32, device)})[name].device


# Naming a device


@pytest.mark.parametrize(("text", "device"), [("cuda", 0), ("cuda:0", 0), ("cuda:3", 3), ("cuda:9999", 9999)])
def test_a_device_is_named_as_torch_names_it(text: str, device: int) -> None:
    assert device_of("A", text) == device


def test_an_output_that_the_model_does_not_have_is_refused_on_a_gpu_too() -> None:
    with pytest.raises(TensorNameError):
        laid_out({"A": ((1,), FP32)}, {"NONE": "cuda:0"})


# A GPU has no strings


def test_an_input_of_strings_cannot_be_on_a_gpu() -> None:
    with pytest.raises(TensorError) as caught:
        laid_out({"TEXT": ((2,), object, "cuda:0")})
    assert caught.value.tensor == "TEXT"


def test_an_output_of_strings_cannot_be_wanted_on_a_gpu() -> None:
    with pytest.raises(TensorError) as caught:
        laid_out({"A": ((1,), FP32)}, {"WORDS": "cuda:0"})
    assert caught.value.tensor == "WORDS"
