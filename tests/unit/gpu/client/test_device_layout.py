"""How tensors on GPUs are laid out: which memory each is in, and how much each GPU must give."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import pytest

from shm_backend_utils.client.inputs.sources import described_inputs, wanted_outputs
from shm_backend_utils.errors import TensorError, TensorTypeError
from shm_backend_utils.model_spec import ModelSpec
from shm_backend_utils.protocol.call_layout import CallLayout, lay_out, rows_of
from shm_backend_utils.protocol.spans import InputSpan, OutputSpan
from tests.unit.sessions import tensor

FP32 = np.float32
LEAST = 256
BEGIN = 8192
SPEC = ModelSpec.from_config(
    {
        "name": "m",
        "input": [tensor("A"), tensor("B"), tensor("C", "UINT8")],
        "output": [tensor("X"), tensor("Y", dims=[5])],
    }
)
BATCHED = ModelSpec.from_config(
    {"name": "b", "max_batch_size": 8, "input": [tensor("A", dims=[3])], "output": [tensor("X", dims=[4])]}
)


def laid_out(inputs: Mapping[str, Any], outputs: Mapping[str, Any], spec: ModelSpec = SPEC) -> CallLayout:
    wanted, devices = wanted_outputs(outputs)
    rows = spec.max_batch_size
    given = described_inputs(inputs)
    return lay_out(spec, given, wanted, BEGIN, learned={}, most_rows=rows, output_devices=devices)


def places(made: CallLayout) -> dict[str, tuple[int, int, int]]:
    """Return where every tensor is: region, offset in its data and byte size."""
    spans: dict[str, InputSpan | OutputSpan] = {**made.table.inputs, **made.table.outputs}
    return {
        name: (span.region, span.offset - (0 if span.region else BEGIN), span.byte_size) for name, span in spans.items()
    }


@pytest.mark.parametrize(("text", "device"), [("cuda", 0), ("cuda:0", 0), ("cuda:3", 3), ("cuda:9999", 9999)])
def test_a_device_is_named_as_torch_names_it(text: str, device: int) -> None:
    given = described_inputs({"A": ((1,), FP32, text), "B": ((1,), FP32)})
    assert (given["A"].device, given["B"].device) == (device, None)
    wanted = wanted_outputs({"X": text, "Y": ((5,), FP32, text), "Z": 4})
    assert (wanted.devices, wanted.byte_sizes) == ({"X": device, "Y": device}, {"X": None, "Y": 20, "Z": 4})


def test_strings_are_not_wanted_on_a_gpu() -> None:
    spec = ModelSpec.from_config({"name": "s", "input": [], "output": [tensor("X", "STRING")]})
    with pytest.raises(TensorTypeError, match="tensor 'X' holds strings, which no GPU has"):
        laid_out({}, {"X": "cuda"}, spec)


@pytest.mark.parametrize(
    "wrong",
    [
        *("", "cpu", "CUDA:0", "cuda:", "cuda:-1", "cuda:1.0", "cuda:00000", "cuda:0\n", " cuda:0"),
        *(0, None, ("cuda", 0), b"cuda:0"),
    ],
    ids=ascii,
)
def test_what_names_no_device_is_refused_with_an_example(wrong: object) -> None:
    for describe in (described_inputs, wanted_outputs):
        with pytest.raises(TensorError, match="the device of tensor 'A' is .*; expected .* 'cuda:0'") as caught:
            describe({"A": ((1,), FP32, cast(Any, wrong))})
        assert caught.value.tensor == "A"


def test_every_memory_is_laid_out_from_its_own_beginning() -> None:
    made = laid_out(
        {"A": ((100,), FP32, "cuda:0"), "B": ((100,), FP32), "C": ((7,), np.uint8, "cuda:0")},
        {"X": ((2, 3), FP32, "cuda:0"), "Y": None},
    )
    assert places(made) == {"A": (1, 0, 400), "B": (0, 0, 400), "C": (1, 512, 7), "X": (1, 768, 24), "Y": (0, 512, 20)}
    assert (made.end, made.devices, made.device_byte_sizes) == (BEGIN + 768, (0,), (1024,))


def test_regions_follow_the_numbers_of_the_devices_and_have_room_for_empty_tensors() -> None:
    made = laid_out({"A": ((0,), FP32, "cuda:7"), "B": ((1,), FP32, "cuda:2")}, {"Y": "cuda:4"})
    assert (made.end, made.devices, made.device_byte_sizes) == (BEGIN, (2, 4, 7), (LEAST,) * 3)
    assert {name: region for name, (region, _, _) in places(made).items()} == {"B": 1, "Y": 2, "A": 3}


def test_rows_of_a_call_stay_on_their_gpu() -> None:
    whole = laid_out({"A": ((6, 3), FP32, "cuda:1")}, {"X": "cuda:1"}, BATCHED)
    part = rows_of(whole, BATCHED, 2, 5)
    assert places(part) == {"A": (1, 24, 36), "X": (1, 256 + 32, 48)}
    assert (part.devices, part.device_byte_sizes) == (whole.devices, whole.device_byte_sizes)
