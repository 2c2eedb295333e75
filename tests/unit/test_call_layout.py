"""How a call is checked against a model's configuration and laid out in a slot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from shm_backend_utils import dtypes
from shm_backend_utils.client.inputs.descriptions import described_inputs, wanted_outputs
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
    CallLayout,
    aligned,
    lay_out,
    obstacle_in_tensors,
    record_byte_size,
    rows_of,
)
from shm_backend_utils.protocol.results import OutputPlace
from shm_backend_utils.protocol.spans import InputSpan, OutputSpan

FP32 = np.dtype(np.float32)
BF16 = dtypes.BF16.numpy
BEGIN = layout.data_offset(1, layout.PAGE_SIZE)
Given = tuple[str, Sequence[int], npt.DTypeLike]


def tensor(name: str, dtype: str = "FP32", dims: Sequence[int] = (-1,), **more: Any) -> dict[str, Any]:
    return {"name": name, "data_type": f"TYPE_{dtype}", "dims": dims, "optional": True} | more


SIMPLE = ModelSpec.from_config({"name": "simple", "input": [tensor("X")], "output": [tensor("Y"), tensor("Z")]})
BATCHED = ModelSpec.from_config(
    {
        "name": "batched",
        "max_batch_size": 8,
        "input": [tensor("X", dims=[3]), tensor("W", "UINT8", dims=[2])],
        "output": [tensor("FIXED", dims=[4]), tensor("OPEN", dims=[-1])],
    }
)
STRINGS = ModelSpec.from_config(
    {
        "name": "strings",
        "input": [tensor("TEXT", "STRING"), tensor("B", "BF16"), tensor("X")],
        "output": [tensor("WORDS", "STRING"), tensor("Y", dims=[5])],
    }
)


def laid_out(
    spec: ModelSpec,
    inputs: Sequence[Given],
    outputs: Any = None,
    learned: Mapping[str, int] | None = None,
    most_rows: int | None = None,
) -> CallLayout:
    rows = spec.max_batch_size if most_rows is None else most_rows
    given = described_inputs({name: (shape, dtype) for name, shape, dtype in inputs})
    wanted, devices = wanted_outputs(outputs)
    return lay_out(spec, given, wanted, BEGIN, learned=learned or {}, most_rows=rows, output_devices=devices)


def rooms(made: CallLayout) -> dict[str, int]:
    return {name: span.byte_size for name, span in made.table.outputs.items()}


def open_room(known: KnownModel) -> int:
    """Return the room of the output of open size, in a call of four rows."""
    return rooms(known.lay_out(described_inputs({"X": ((4, 3), FP32)}), None))["OPEN"]


def test_an_input_has_its_place_and_size() -> None:
    span = laid_out(SIMPLE, [("X", (10,), FP32)]).table.inputs["X"]
    assert (span.region, span.offset, span.byte_size, span.shape, span.dtype.name) == (0, BEGIN, 40, (10,), "FP32")


def test_tensors_follow_each_other_at_multiples_of_256() -> None:
    made = laid_out(BATCHED, [("X", (5, 3), FP32), ("W", (5, 2), np.uint8)], {"FIXED": None, "OPEN": 300})
    spans: list[InputSpan | OutputSpan] = [*made.table.inputs.values(), *made.table.outputs.values()]
    assert [(span.offset - BEGIN, span.byte_size) for span in spans] == [(0, 60), (256, 10), (512, 80), (768, 300)]
    assert made.end == BEGIN + 1280


def test_by_default_all_outputs_are_wanted() -> None:
    made = laid_out(SIMPLE, [("X", (1,), FP32)])
    assert made.requested is None
    assert list(made.table.outputs) == ["Y", "Z"]


def test_only_the_outputs_that_are_wanted_have_room() -> None:
    made = laid_out(SIMPLE, [("X", (1,), FP32)], ["Z"])
    assert made.requested == ("Z",)
    assert list(made.table.outputs) == ["Z"]


def test_no_output_may_be_wanted() -> None:
    made = laid_out(SIMPLE, [("X", (1,), FP32)], [])
    assert (made.requested, made.table.outputs) == ((), {})


@pytest.mark.parametrize(("hint", "room"), [(0, 0), (100, 100), (((2, 3), np.float64), 48), (((), "int8"), 1)], ids=str)
def test_a_hint_says_how_much_room_an_output_gets(hint: Any, room: int) -> None:
    made = laid_out(SIMPLE, [("X", (1,), FP32)], {"Y": hint})
    assert made.table.outputs["Y"].byte_size == room
    assert made.certain == {"Y"}


def test_a_hint_may_be_any_kind_of_integer() -> None:
    assert laid_out(SIMPLE, [("X", (1,), FP32)], {"Y": np.prod([4, 5])}).table.outputs["Y"].byte_size == 20


def test_a_size_that_follows_from_the_configuration_is_certain() -> None:
    made = laid_out(BATCHED, [("X", (5, 3), FP32)])
    assert made.table.outputs["FIXED"].byte_size == 5 * 4 * 4
    assert made.certain == {"FIXED"}


def test_an_output_of_which_nothing_is_known_has_no_room() -> None:
    assert laid_out(BATCHED, [("X", (5, 3), FP32)]).table.outputs["OPEN"].byte_size == 0


def test_what_was_learned_of_a_row_gives_room_for_every_row() -> None:
    made = laid_out(BATCHED, [("X", (5, 3), FP32)], learned={"OPEN": 100})
    assert made.table.outputs["OPEN"].byte_size == 500
    assert "OPEN" not in made.certain


def test_what_was_learned_gives_way_to_a_hint_and_to_the_configuration() -> None:
    made = laid_out(BATCHED, [("X", (5, 3), FP32)], {"OPEN": 7, "FIXED": None}, learned={"OPEN": 100, "FIXED": 999})
    assert (made.table.outputs["OPEN"].byte_size, made.table.outputs["FIXED"].byte_size) == (7, 80)


def test_an_output_without_a_hint_beside_others_that_have_one_is_learned() -> None:
    made = laid_out(SIMPLE, [("X", (1,), FP32)], {"Y": None, "Z": 4}, learned={"Y": 64})
    assert (made.table.outputs["Y"].byte_size, set(made.certain)) == (64, {"Z"})


def test_a_model_that_learned_gives_head_room_at_its_next_call() -> None:
    known = KnownModel(BATCHED, head_room=1.5)
    assert open_room(known) == 0
    known.learn({"OPEN": 400}, rows=4)
    assert open_room(known) == 600


def test_a_model_does_not_unlearn() -> None:
    known = KnownModel(BATCHED, head_room=1)
    known.learn({"OPEN": 400}, rows=4)
    known.learn({"OPEN": 100}, rows=4)
    assert open_room(known) == 400


def test_a_model_learns_nothing_of_outputs_that_it_does_not_have() -> None:
    known = KnownModel(BATCHED, head_room=1)
    known.learn({"OTHER": 400}, rows=4)
    assert open_room(known) == 0


def test_a_call_of_a_known_model_begins_behind_the_records_of_its_slots() -> None:
    known = KnownModel(SIMPLE, head_room=1)
    given = described_inputs({"X": ((1,), FP32)})
    begins = [known.lay_out(given, None, slot_count=count).table.inputs["X"].offset for count in (1, 2, 7)]
    assert begins == [layout.data_offset(count, known.record_byte_size) for count in (1, 2, 7)]


def test_a_tensor_begins_at_the_next_multiple_of_256() -> None:
    assert [aligned(offset) for offset in (0, 1, 255, 256, 257)] == [0, 256, 256, 256, 512]


def model_of(name_length: int, count: int, rank: int = 1) -> ModelSpec:
    """Return a model with so many inputs and outputs, whose names are so long."""
    tensors = [tensor(f"{index:03}".rjust(name_length, "n"), dims=[-1] * rank) for index in range(count)]
    return ModelSpec.from_config({"name": "many", "input": tensors, "output": tensors})


@pytest.mark.parametrize(
    ("name_length", "count", "rank"), [(3, 1, 1), (3, 20, 4), (300, 3, 4), (60, 256, 8), (3, 8, 32)]
)
def test_records_have_room_for_any_call_of_a_model(name_length: int, count: int, rank: int) -> None:
    spec = model_of(name_length, count, rank)
    size = record_byte_size(spec)
    shape = (1,) * rank
    made = laid_out(spec, [(name, shape, FP32) for name in spec.inputs])
    written = [
        OutputPlace(name, spec.outputs[name].dtype or dtypes.BYTES, shape, 0, 0, 4, False) for name in spec.outputs
    ]
    assert 8 + len(table.encode(made.table)) <= size // 2
    assert results.results_length(results.encode(written)) <= size // 2


def test_records_are_a_page_or_a_power_of_two_of_them() -> None:
    assert record_byte_size(SIMPLE) == layout.PAGE_SIZE
    sizes = {record_byte_size(model_of(30, count)) for count in range(1, 256, 10)}
    assert len(sizes) > 3
    assert all(size % layout.PAGE_SIZE == 0 and size & (size - 1) == 0 for size in sizes)


@pytest.mark.parametrize(
    ("spec", "obstacle"),
    [
        (SIMPLE, None),
        (model_of(3, 256, 32), None),
        (model_of(3, 257), "has 514 inputs and outputs, and a slot tells of 512"),
        (model_of(3, 1, 33), "tensor '000' has 33 dimensions, and a slot tells of 32"),
        (model_of(2**16, 1), "has a name of more than 65535 bytes"),
        (model_of(2**15, 10), "the names of the tensors of model 'many' are longer than a slot has room for"),
    ],
    ids=["few", "as many as can be", "too many", "too many dimensions", "too long a name", "too long together"],
)
def test_a_model_whose_tensors_no_slot_can_tell_of_is_told_before_a_call(spec: ModelSpec, obstacle: str | None) -> None:
    found = obstacle_in_tensors(spec)
    assert found is None if obstacle is None else obstacle in (found or "")
    assert record_byte_size(spec) <= layout.MAX_RECORD_BYTE_SIZE


def test_strings_and_bf16_lie_beside_the_others() -> None:
    made = laid_out(STRINGS, [("TEXT", (2,), "S20"), ("X", (1,), FP32), ("B", (3,), BF16)])
    spans = {name: (span.offset - BEGIN, span.byte_size, span.dtype.name) for name, span in made.table.inputs.items()}
    assert spans == {"TEXT": (0, 48, "BYTES"), "X": (256, 4, "FP32"), "B": (512, 6, "BF16")}


def test_a_string_of_known_length_has_room_for_its_length_and_its_bytes() -> None:
    assert laid_out(STRINGS, [("TEXT", (5,), "S7")]).table.inputs["TEXT"].byte_size == 5 * (4 + 7)


def test_a_character_may_take_four_bytes() -> None:
    assert laid_out(STRINGS, [("TEXT", (5,), "U7")]).table.inputs["TEXT"].byte_size == 5 * (4 + 7 * len("😀".encode()))


def test_a_string_of_unknown_length_has_room_for_60_bytes() -> None:
    assert laid_out(STRINGS, [("TEXT", (5,), object)]).table.inputs["TEXT"].byte_size == 5 * 64


@pytest.mark.parametrize("dtype", ["S", "U", "S0", bytes, str], ids=repr)
def test_strings_without_a_length_have_room_for_empty_ones_at_least(dtype: Any) -> None:
    assert laid_out(STRINGS, [("TEXT", (5,), dtype)]).table.inputs["TEXT"].byte_size >= 5 * 4


@pytest.mark.parametrize("dtype", ["U7", "S7", object, bytes])
def test_strings_of_every_dtype_are_described_as_strings(dtype: Any) -> None:
    assert described_inputs({"TEXT": ((2,), dtype)})["TEXT"].dtype is dtypes.BYTES


@pytest.mark.parametrize(
    ("hint", "room"), [(0, 0), (100, 100), (((2,), "S20"), 48), (((2, 3), "U2"), 72), (((2,), object), 128)], ids=str
)
def test_a_hint_says_how_much_room_an_output_of_strings_gets(hint: Any, room: int) -> None:
    made = laid_out(STRINGS, [], {"WORDS": hint})
    assert (made.table.outputs["WORDS"].byte_size, set(made.certain)) == (room, {"WORDS"})


def test_an_output_of_strings_is_of_open_size_whatever_its_shape() -> None:
    output = tensor("WORDS", "STRING", [2, 3])
    made = laid_out(ModelSpec.from_config({"name": "model", "output": [output]}), [], learned={"WORDS": 100})
    assert (made.table.outputs["WORDS"].byte_size, set(made.certain)) == (100, set())


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *[("TEXT", np.float32), ("TEXT", np.uint8), ("TEXT", BF16)],
        *[("B", np.float16), ("B", np.float32), ("B", np.uint16), ("B", object)],
    ],
)
def test_strings_and_bf16_are_not_taken_for_each_other_or_for_anything_else(name: str, dtype: Any) -> None:
    with pytest.raises(TensorTypeError, match=f"'{name}' is .*, but the model's configuration says TYPE_") as caught:
        laid_out(STRINGS, [(name, (2,), dtype)])
    assert caught.value.tensor == name


@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [
        ({"TEXT": ((2,), "S20", "cuda:0")}, None),
        ({}, {"WORDS": "cuda:0"}),
        ({}, {"WORDS": ((2,), object, "cuda:1")}),
    ],
    ids=["input", "output", "output of known size"],
)
def test_strings_cannot_lie_in_memory_of_a_gpu(inputs: Any, outputs: Any) -> None:
    with pytest.raises(TensorError, match="'TEXT'|'WORDS'"):
        lay_out(
            STRINGS,
            described_inputs(inputs),
            wanted_outputs(outputs).byte_sizes,
            BEGIN,
            learned={},
            most_rows=0,
            output_devices=wanted_outputs(outputs).devices,
        )


def test_strings_must_have_the_right_shape() -> None:
    with pytest.raises(TensorShapeError, match="'TEXT' has shape"):
        laid_out(STRINGS, [("TEXT", (2, 2), object)])


def test_the_batch_size_is_that_of_the_inputs() -> None:
    assert laid_out(BATCHED, [("X", (5, 3), FP32), ("W", (5, 2), np.uint8)]).batch_size == 5
    assert laid_out(SIMPLE, [("X", (5,), FP32)]).batch_size is None


@pytest.mark.parametrize("rows", [1, 8])
def test_a_batch_of_up_to_the_models_size_is_taken(rows: int) -> None:
    assert laid_out(BATCHED, [("X", (rows, 3), FP32)]).batch_size == rows


def test_a_batch_that_is_too_large_is_refused_with_the_way_out() -> None:
    with pytest.raises(BatchSizeError, match="'X' has a batch of 9, but .* takes 1 to 8; split=True sends several"):
        laid_out(BATCHED, [("X", (9, 3), FP32)])


def test_an_empty_batch_is_refused() -> None:
    with pytest.raises(BatchSizeError, match="'X' has a batch of 0, but model 'batched' takes 1 to 8$"):
        laid_out(BATCHED, [("X", (0, 3), FP32)])


def test_a_batch_that_will_be_split_may_be_larger() -> None:
    assert laid_out(BATCHED, [("X", (1000, 3), FP32)], most_rows=2**31).batch_size == 1000


def test_inputs_of_different_batch_sizes_are_refused() -> None:
    with pytest.raises(BatchSizeError, match="must have one batch size; found X 5, W 4"):
        laid_out(BATCHED, [("X", (5, 3), FP32), ("W", (4, 2), np.uint8)])


def test_a_batch_without_inputs_is_refused() -> None:
    with pytest.raises(MissingTensorError, match="model 'batched' takes batches, .* found no input"):
        laid_out(BATCHED, [])


def test_a_call_without_inputs_is_fine_where_all_are_optional() -> None:
    assert laid_out(SIMPLE, []).end == BEGIN


def test_an_input_that_is_needed_must_be_there() -> None:
    spec = ModelSpec.from_config({"name": "strict", "input": [tensor("X", optional=False), tensor("W")]})
    with pytest.raises(
        MissingTensorError, match="model 'strict' needs input 'X', which the call does not have"
    ) as found:
        laid_out(spec, [("W", (1,), FP32)])
    assert found.value.tensor == "X"


@pytest.mark.parametrize(
    ("inputs", "outputs", "message"),
    [
        ([("Q", (1,), FP32)], None, "model 'simple' has no input 'Q'; it has X"),
        ([], ["Q"], "model 'simple' has no output 'Q'; it has Y, Z"),
        ([], {"Q": 4}, "model 'simple' has no output 'Q'; it has Y, Z"),
    ],
)
def test_names_that_the_model_does_not_have_are_refused(inputs: Any, outputs: Any, message: str) -> None:
    with pytest.raises(TensorNameError, match=message):
        laid_out(SIMPLE, inputs, outputs)


def test_outputs_that_are_one_string_and_no_list_are_refused_as_such() -> None:
    with pytest.raises(TensorError, match="'YZ'|list"):
        laid_out(SIMPLE, [], "YZ")


@pytest.mark.parametrize("dtype", [np.float64, np.int32, ">f4", object, "U3", np.complex64, "M8[s]"], ids=str)
def test_an_input_of_another_dtype_is_refused(dtype: Any) -> None:
    with pytest.raises(TensorTypeError, match="tensor 'X' "):
        laid_out(SIMPLE, [("X", (1,), dtype)])


@pytest.mark.parametrize("shape", [(), (2, 3)], ids=str)
def test_an_input_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(TensorShapeError, match="tensor 'X' has shape .*, but the model's configuration says"):
        laid_out(SIMPLE, [("X", shape, FP32)])


def test_a_negative_size_is_no_shape() -> None:
    with pytest.raises(TensorShapeError):
        laid_out(SIMPLE, [("X", (-1,), FP32)])


@pytest.mark.parametrize("hint", [-1, ((-1000,), np.float32), 1.5, "many", (3,)], ids=str)
def test_a_hint_that_is_no_size_is_refused(hint: Any) -> None:
    with pytest.raises(TensorError) as caught:
        laid_out(SIMPLE, [("X", (1,), FP32)], {"Y": hint})
    assert caught.value.tensor == "Y"


def test_rows_of_a_call_lie_where_they_lie_in_the_whole() -> None:
    whole = laid_out(BATCHED, [("X", (6, 3), FP32)], {"FIXED": None, "OPEN": 61})
    part = rows_of(whole, BATCHED, 2, 5)
    x = part.table.inputs["X"]
    assert part.batch_size == 3
    assert (x.region, x.offset - BEGIN, x.byte_size, x.shape) == (0, 24, 36, (3, 3))
    outputs = {name: (span.offset - BEGIN, span.byte_size) for name, span in part.table.outputs.items()}
    assert outputs == {"FIXED": (256 + 32, 48), "OPEN": (512 + 16, 24)}


def test_rows_of_an_output_begin_where_an_element_may_begin_whatever_room_was_learned_or_hinted_at() -> None:
    given = [("X", (6, 3), FP32)]
    for whole in (laid_out(BATCHED, given, learned={"OPEN": 5005}), laid_out(BATCHED, given, {"OPEN": 61})):
        for row in range(6):
            assert rows_of(whole, BATCHED, row, row + 1).table.outputs["OPEN"].offset % 4 == 0
