"""How tensors on GPUs are laid out: which memory each is in, and how much each GPU must give."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import pytest

from shm_backend_utils.client.inputs.sources import InputDescription, OutputHint, described_inputs, wanted_outputs
from shm_backend_utils.errors import TensorError
from shm_backend_utils.model_spec import ModelSpec
from shm_backend_utils.protocol.call_layout import CallInput, CallLayout, lay_out, rows_of
from shm_backend_utils.protocol.spans import InputSpan, OutputSpan

FP32 = np.float32
LEAST = 256
BEGIN = 8192


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
    """Lay a call out in a region whose data begins at ``BEGIN``."""
    given, (wanted, devices) = described_inputs(inputs), wanted_outputs(outputs)
    rows = spec.max_batch_size
    return lay_out(spec, given, wanted, BEGIN, learned=learned or {}, most_rows=rows, output_devices=devices)


def places(made: CallLayout) -> dict[str, tuple[int, int, int]]:
    """Return where every tensor is: region, offset in its data and byte size."""
    spans: dict[str, InputSpan | OutputSpan] = {**made.table.inputs, **made.table.outputs}
    return {
        name: (span.region, span.offset - (0 if span.region else BEGIN), span.byte_size) for name, span in spans.items()
    }


# Naming a device


@pytest.mark.parametrize(("text", "device"), [("cuda", 0), ("cuda:0", 0), ("cuda:3", 3), ("cuda:9999", 9999)])
def test_a_device_is_named_as_torch_names_it(text: str, device: int) -> None:
    assert described_inputs({"A": ((1,), FP32, text)})["A"].device == device
    assert wanted_outputs({"X": text, "Y": ((1,), FP32, text)}).devices == {"X": device, "Y": device}


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


# Descriptions


def test_descriptions_say_which_tensors_are_on_which_gpu() -> None:
    inputs = described_inputs({"A": ((2,), FP32, "cuda:1"), "B": ((2,), FP32), "C": ((2,), np.uint8, "cuda")})
    assert {name: each.device for name, each in inputs.items()} == {"A": 1, "B": None, "C": 0}
    wanted = wanted_outputs({"X": "cuda:2", "Y": ((5,), FP32, "cuda:1"), "Z": 4})
    assert (wanted.devices, wanted.byte_sizes) == ({"X": 2, "Y": 1}, {"X": None, "Y": 20, "Z": 4})


# Layout


def test_every_memory_is_laid_out_from_its_own_beginning() -> None:
    made = laid_out(
        {"A": ((100,), FP32, "cuda:0"), "B": ((100,), FP32), "C": ((7,), np.uint8, "cuda:0")},
        {"X": ((2, 3), FP32, "cuda:0"), "Y": None},
    )
    assert places(made) == {"A": (1, 0, 400), "B": (0, 0, 400), "C": (1, 512, 7), "X": (1, 768, 24), "Y": (0, 512, 20)}
    assert (made.end, made.devices, made.device_byte_sizes) == (BEGIN + 768, (0,), (1024,))


def test_regions_follow_the_numbers_of_the_devices_whatever_the_order_of_the_tensors() -> None:
    made = laid_out({"A": ((1,), FP32, "cuda:7"), "B": ((1,), FP32, "cuda:2")}, {"Y": "cuda:4"})
    assert made.devices == (2, 4, 7)
    assert {name: region for name, (region, _, _) in places(made).items()} == {"B": 1, "Y": 2, "A": 3}


def test_a_gpu_that_has_nothing_but_empty_tensors_still_has_memory() -> None:
    made = laid_out({"A": ((0,), FP32, "cuda:0")}, {"X": "cuda:1"})
    assert (made.devices, made.device_byte_sizes) == ((0, 1), (LEAST, LEAST))


def test_a_call_that_is_all_on_gpus_needs_nothing_of_the_host() -> None:
    made = laid_out({"A": ((10,), FP32, "cuda:0")}, {"Y": "cuda:0"})
    assert made.end == BEGIN


def test_the_same_call_on_the_host_has_everything_there() -> None:
    given = described_inputs({"A": ((100,), FP32, "cuda:0"), "B": ((100,), FP32, "cuda:1")})
    on_host = {name: CallInput(each.dtype, each.shape, each.byte_size) for name, each in given.items()}
    made = lay_out(SPEC, on_host, wanted_outputs({"Y": "cuda:1"}).byte_sizes, BEGIN, learned={}, most_rows=0)
    assert places(made) == {"A": (0, 0, 400), "B": (0, 512, 400), "Y": (0, 1024, 20)}
    assert (made.end, made.devices) == (BEGIN + 1280, ())


def test_rows_of_a_call_stay_on_their_gpu() -> None:
    whole = laid_out({"A": ((6, 3), FP32, "cuda:1")}, {"X": "cuda:1"}, spec=BATCHED)
    part = rows_of(whole, BATCHED, 2, 5)
    assert places(part) == {"A": (1, 24, 36), "X": (1, 256 + 32, 48)}
    assert (part.devices, part.device_byte_sizes) == (whole.devices, whole.device_byte_sizes)
