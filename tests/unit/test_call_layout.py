"""How a call is checked against a model's configuration and laid out in a slot, and on GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import pytest

from shm_backend_utils import dtypes
from shm_backend_utils.client.inputs.sources import described_inputs, wanted_outputs
from shm_backend_utils.client.known_model import KnownModel
from shm_backend_utils.errors import (
    BatchSizeError,
    MissingTensorError,
    TensorError,
    TensorNameError,
    TensorShapeError,
    TensorTypeError,
)
from shm_backend_utils.model_spec import ModelSpec
from shm_backend_utils.protocol import layout, results, table
from shm_backend_utils.protocol.call_layout import (
    CALLS,
    CallLayout,
    LearnedSizes,
    lay_out,
    obstacle_in_tensors,
    record_byte_size,
    rows_of,
)
from shm_backend_utils.protocol.results import OutputPlace
from shm_backend_utils.protocol.spans import InputSpan, OutputSpan
from tests.unit.sessions import tensor

FP32 = np.dtype(np.float32)
BF16 = dtypes.BF16.numpy
BEGIN = layout.data_offset(1, layout.PAGE_SIZE)


SIMPLE = ModelSpec.from_config({"name": "simple", "input": [tensor("X")], "output": [tensor("Y"), tensor("Z")]})
BATCHED = ModelSpec.from_config(
    {
        "name": "batched",
        "max_batch_size": 8,
        "input": [tensor("X", dims=[3]), tensor("W", "UINT8", dims=[2])],
        "output": [tensor("FIXED", dims=[4]), tensor("OPEN", dims=[-1])],
    }
)
MIXED = ModelSpec.from_config(
    {
        "name": "mixed",
        "input": [{**tensor("X"), "optional": False}, tensor("W")],
        "output": [tensor("Y"), {"name": "ANY", "dims": [1]}],
    }
)
STRINGS = ModelSpec.from_config(
    {
        "name": "strings",
        "input": [tensor("TEXT", "STRING"), tensor("B", "BF16"), tensor("X")],
        "output": [tensor("WORDS", "STRING"), tensor("Y", dims=[5]), tensor("SHAPED", "STRING", [2, 3])],
    }
)


def laid_out(
    spec: ModelSpec,
    inputs: Mapping[str, Any],
    outputs: Any = None,
    learned: Mapping[str, int] | None = None,
    most_rows: int | None = None,
) -> CallLayout:
    rows = spec.max_batch_size if most_rows is None else most_rows
    wanted, devices = wanted_outputs(outputs)
    given = described_inputs(inputs)
    return lay_out(spec, given, wanted, BEGIN, learned=learned or {}, most_rows=rows, output_devices=devices)


def rooms(made: CallLayout) -> dict[str, int]:
    return {name: span.byte_size for name, span in made.table.outputs.items()}


ONE, ROWS = {"X": ((1,), FP32)}, {"X": ((5, 3), FP32)}


@pytest.mark.parametrize(
    ("spec", "inputs", "hints", "learned", "expected", "certain"),
    [
        (SIMPLE, ONE, {"Y": 0}, {}, {"Y": 0}, {"Y"}),
        (SIMPLE, ONE, {"Y": 100}, {}, {"Y": 100}, {"Y"}),
        (SIMPLE, ONE, {"Y": np.prod([4, 5])}, {}, {"Y": 20}, {"Y"}),
        (SIMPLE, ONE, {"Y": ((2, 3), np.float64)}, {}, {"Y": 48}, {"Y"}),
        (SIMPLE, ONE, {"Y": ((), "int8")}, {}, {"Y": 1}, {"Y"}),
        (SIMPLE, ONE, {"Y": None, "Z": 4}, {"Y": 64}, {"Y": 64, "Z": 4}, {"Z"}),
        (MIXED, ONE, None, {}, {"Y": 0}, set()),
        (BATCHED, ROWS, {"FIXED": 100}, {}, {"FIXED": 100}, {"FIXED"}),
        (BATCHED, ROWS, None, {}, {"FIXED": 5 * 4 * 4, "OPEN": 0}, {"FIXED"}),
        (BATCHED, ROWS, None, {"OPEN": 100}, {"FIXED": 80, "OPEN": 500}, {"FIXED"}),
        (BATCHED, ROWS, {"OPEN": 7, "FIXED": None}, {"OPEN": 100, "FIXED": 9}, {"OPEN": 7, "FIXED": 80}, None),
        (STRINGS, {}, {"WORDS": 0}, {}, {"WORDS": 0}, {"WORDS"}),
        (STRINGS, {}, {"WORDS": ((2,), "S20")}, {}, {"WORDS": 48}, {"WORDS"}),
        (STRINGS, {}, {"WORDS": ((2, 3), "U2")}, {}, {"WORDS": 72}, {"WORDS"}),
        (STRINGS, {}, {"WORDS": ((2,), object)}, {}, {"WORDS": 128}, {"WORDS"}),
        (STRINGS, {}, ["SHAPED"], {"SHAPED": 100}, {"SHAPED": 100}, set()),
    ],
)
def test_an_outputs_room_is_hinted_at_configured_or_learned(
    spec: ModelSpec, inputs: Any, hints: Any, learned: Any, expected: dict[str, int], certain: set[str] | None
) -> None:
    made = laid_out(spec, inputs, hints, learned)
    assert rooms(made) == expected
    assert certain is None or made.certain == certain


def test_a_model_that_learned_gives_head_room_at_its_next_call_and_does_not_unlearn() -> None:
    known = KnownModel(BATCHED, head_room=1.5)
    for byte_size in (0, 400, 100):
        if byte_size:
            known.learned.learn({"OPEN": byte_size}, rows=4)
        made = known.lay_out(described_inputs({"X": ((4, 3), FP32)}), None)
        assert rooms(made)["OPEN"] == (600 if byte_size else 0)


def test_learned_sizes_shrink_when_enough_calls_have_needed_less() -> None:
    learned = LearnedSizes(head_room=1)
    learned.learn({"Y": 600}, rows=1)
    for least in (600, 6):
        while len(learned.needed) < CALLS - 1:
            learned.needed.append(6)
            assert not learned.shrink()
        learned.needed.append(6)
        learned.shrink()
        assert learned.per_row == {"Y": least}


def model_of(name_length: int, count: int, rank: int = 1) -> ModelSpec:
    tensors = [tensor(f"{index:03}".rjust(name_length, "n"), dims=[-1] * rank) for index in range(count)]
    return ModelSpec.from_config({"name": "many", "input": tensors, "output": tensors})


@pytest.mark.parametrize(
    ("name_length", "count", "rank"), [(3, 1, 1), (3, 20, 4), (300, 3, 4), (60, 256, 8), (3, 8, 32)]
)
def test_records_have_room_for_any_call_of_a_model(name_length: int, count: int, rank: int) -> None:
    spec = model_of(name_length, count, rank)
    half, shape = record_byte_size(spec) // 2, (1,) * rank
    made = laid_out(spec, dict.fromkeys(spec.inputs, (shape, FP32)))
    written = [OutputPlace(name, dtypes.BYTES, shape, 0, 0, 4, False) for name in spec.outputs]
    assert 8 + len(table.encode(made.table)) <= half
    assert 16 + len(results.encode(written)) <= half


@pytest.mark.parametrize(
    ("spec", "obstacle"),
    [
        (SIMPLE, None),
        (model_of(3, 256, 32), None),
        (model_of(3, 257), "has 514 inputs and outputs; a slot can describe 512"),
        (model_of(3, 1, 33), "tensor '000' has 33 dimensions; a slot can describe 32"),
        (model_of(2**16, 1), "has a name of more than 65535 bytes"),
        (model_of(2**15, 10), "the names of the tensors of model 'many' are longer than a slot has room for"),
    ],
    ids=range(6),
)
def test_a_model_whose_tensors_no_slot_can_tell_of_is_told_before_a_call(spec: ModelSpec, obstacle: str | None) -> None:
    found = obstacle_in_tensors(spec)
    assert found is None if obstacle is None else obstacle in (found or "")
    assert record_byte_size(spec) <= layout.MAX_RECORD_BYTE_SIZE


@pytest.mark.parametrize(
    ("dtype", "room"),
    [("S7", 4 + 7), ("U7", 4 + 28), (object, 64), *((each, None) for each in ("S", "U", "S0", bytes, str))],
)
def test_a_string_has_room_for_its_length_and_as_many_bytes_as_it_may_have(dtype: Any, room: int | None) -> None:
    assert described_inputs({"TEXT": ((2,), dtype)})["TEXT"].dtype is dtypes.BYTES
    found = laid_out(STRINGS, {"TEXT": ((5,), dtype)}).table.inputs["TEXT"].byte_size
    assert found >= 5 * 4 if room is None else found == 5 * room


def test_the_batch_size_is_that_of_the_inputs() -> None:
    for rows in (1, 5, 8):
        assert laid_out(BATCHED, {"X": ((rows, 3), FP32), "W": ((rows, 2), np.uint8)}).batch_size == rows
    assert laid_out(BATCHED, {"X": ((1000, 3), FP32)}, most_rows=2**31).batch_size == 1000, "it will be split"
    assert laid_out(SIMPLE, {"X": ((5,), FP32)}).batch_size is None
    assert laid_out(SIMPLE, {}).end == BEGIN, "all inputs are optional"


OTHER_DTYPES = [
    *((SIMPLE, "X", dtype) for dtype in (np.float64, np.int32, ">f4", object, "U3", np.complex64, "M8[s]")),
    *((STRINGS, "TEXT", dtype) for dtype in (np.float32, np.uint8, BF16)),
    *((STRINGS, "B", dtype) for dtype in (np.float16, np.float32, np.uint16, object)),
]


@pytest.mark.parametrize(
    ("spec", "inputs", "outputs", "kind", "message", "name"),
    [
        (BATCHED, {"X": ((9, 3), FP32)}, None, BatchSizeError, "'X' .* of 9, .* takes 1 to 8; .*split=True", None),
        (BATCHED, {"X": ((0, 3), FP32)}, None, BatchSizeError, "'X' .* of 0, but model 'batched' takes 1 to 8$", None),
        (
            *(BATCHED, {"X": ((5, 3), FP32), "W": ((4, 2), np.uint8)}, None),
            *(BatchSizeError, "one .* found X 5, W 4", None),
        ),
        (BATCHED, {}, None, MissingTensorError, "model 'batched' takes batches, .* found no input", None),
        (MIXED, {"W": ((1,), FP32)}, None, MissingTensorError, "'mixed' needs input 'X', which the call does", "X"),
        (SIMPLE, {"Q": ((1,), FP32)}, None, TensorNameError, "model 'simple' has no input 'Q'; it has X", "Q"),
        (SIMPLE, {}, ["Q"], TensorNameError, "model 'simple' has no output 'Q'; it has Y, Z", "Q"),
        (SIMPLE, {}, {"Q": 4}, TensorNameError, "model 'simple' has no output 'Q'; it has Y, Z", "Q"),
        (SIMPLE, {}, "YZ", TensorError, "'YZ'|list", None),
        (STRINGS, {}, {"WORDS": "cuda"}, TensorTypeError, "'WORDS' holds strings, which cannot be on a GPU", "WORDS"),
        (STRINGS, {"TEXT": ((2, 2), object)}, None, TensorShapeError, "'TEXT' has shape", "TEXT"),
        *(
            (SIMPLE, {"X": (shape, FP32)}, None, TensorShapeError, f"tensor 'X' has shape .*{said}", "X")
            for shape, said in (((), "model's conf"), ((2, 3), "model's conf"), ((-1,), "whole numbers"))
        ),
        *(
            (spec, {name: ((2,), dtype)}, None, TensorTypeError, f"'{name}' ", name)
            for spec, name, dtype in OTHER_DTYPES
        ),
    ],
)
def test_a_call_that_the_model_does_not_take_is_refused(
    spec: ModelSpec, inputs: Any, outputs: Any, kind: type[TensorError], message: str, name: str | None
) -> None:
    with pytest.raises(kind, match=message) as caught:
        laid_out(spec, inputs, outputs)
    assert name is None or caught.value.tensor == name


ON_GPUS = ModelSpec.from_config(
    {
        "name": "m",
        "input": [tensor("A"), tensor("B"), tensor("C", "UINT8")],
        "output": [tensor("X"), tensor("Y", dims=[5])],
    }
)
ROWS_ON_GPUS = ModelSpec.from_config(
    {"name": "b", "max_batch_size": 8, "input": [tensor("A", dims=[3])], "output": [tensor("X", dims=[4])]}
)


def places(made: CallLayout) -> dict[str, tuple[int, int, int]]:
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


@pytest.mark.parametrize(
    "wrong",
    [
        *("", "cpu", "CUDA:0", "cuda:", "cuda:-1", "cuda:1.0", "cuda:00000", "cuda:0\n", " cuda:0"),
        *(0, None, ("cuda", 0), b"cuda:0"),
    ],
)
def test_what_names_no_device_is_refused_with_an_example(wrong: object) -> None:
    for describe in (described_inputs, wanted_outputs):
        with pytest.raises(TensorError, match="the device of tensor 'A' is .*; expected .* 'cuda:0'") as caught:
            describe({"A": ((1,), FP32, cast(Any, wrong))})
        assert caught.value.tensor == "A"


def test_every_memory_is_laid_out_from_its_own_beginning_in_the_order_of_the_devices() -> None:
    inputs = {"A": ((100,), FP32, "cuda:0"), "B": ((100,), FP32), "C": ((7,), np.uint8, "cuda:0")}
    made = laid_out(ON_GPUS, inputs, {"X": ((2, 3), FP32, "cuda:0"), "Y": None})
    assert places(made) == {"A": (1, 0, 400), "B": (0, 0, 400), "C": (1, 512, 7), "X": (1, 768, 24), "Y": (0, 512, 20)}
    assert (made.end, made.devices, made.device_byte_sizes) == (BEGIN + 768, (0,), (1024,))
    empty = laid_out(ON_GPUS, {"A": ((0,), FP32, "cuda:7"), "B": ((1,), FP32, "cuda:2")}, {"Y": "cuda:4"})
    assert (empty.end, empty.devices, empty.device_byte_sizes) == (BEGIN, (2, 4, 7), (256,) * 3)
    assert {name: region for name, (region, _, _) in places(empty).items()} == {"B": 1, "Y": 2, "A": 3}


def test_rows_of_a_call_stay_on_their_gpu() -> None:
    whole = laid_out(ROWS_ON_GPUS, {"A": ((6, 3), FP32, "cuda:1")}, {"X": "cuda:1"})
    part = rows_of(whole, ROWS_ON_GPUS, 2, 5)
    assert places(part) == {"A": (1, 24, 36), "X": (1, 256 + 32, 48)}
    assert (part.devices, part.device_byte_sizes) == (whole.devices, whole.device_byte_sizes)
