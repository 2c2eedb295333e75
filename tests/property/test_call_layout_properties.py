"""What holds for the layout of every call."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shm_backend_utils import dtypes
from shm_backend_utils.client.inputs.descriptions import described_inputs
from shm_backend_utils.dtypes import BYTES, LENGTH_SIZE
from shm_backend_utils.model_spec import ModelSpec
from shm_backend_utils.protocol.call_layout import CallInput, CallLayout, lay_out, rows_of
from shm_backend_utils.protocol.spans import InputSpan, OutputSpan, check_outputs_are_apart

BEGIN = 8192


class Made(NamedTuple):
    """A layout, and what it was made of."""

    spec: ModelSpec
    given: dict[str, CallInput]
    hints: dict[str, int | None] | None
    layout: CallLayout


sizes = st.lists(st.integers(0, 50), max_size=3)
data_types = st.sampled_from(list(dtypes.BY_NAME.values()))


@st.composite
def layouts(draw: st.DrawFn, rows: st.SearchStrategy[int | None]) -> Made:
    """Layouts of calls of any model, with hints for some outputs, and some learned."""
    row_count = draw(rows)
    batch = [] if row_count is None else [row_count]
    inputs, config_inputs, config_outputs = [], [], []
    for index in range(draw(st.integers(1, 4))):
        dtype, dims = draw(data_types), draw(sizes)
        config_inputs.append({"name": f"I{index}", "data_type": config_name(dtype), "dims": [-1] * len(dims)})
        kind = f"S{draw(st.integers(1, 50))}" if dtype is BYTES else dtype.numpy
        inputs.append((f"I{index}", (*batch, *dims), np.dtype(kind)))
    for index in range(draw(st.integers(0, 4))):
        dims = [draw(st.sampled_from([size, -1])) for size in draw(sizes)]
        config_outputs.append({"name": f"O{index}", "data_type": config_name(draw(data_types)), "dims": dims})
    spec = ModelSpec.from_config(
        {
            "name": "model",
            "max_batch_size": 0 if row_count is None else 64,
            "input": config_inputs,
            "output": config_outputs,
        }
    )
    names = list(spec.outputs)
    hints = (
        draw(st.none() | st.dictionaries(st.sampled_from(names), st.none() | st.integers(0, 5000))) if names else None
    )
    learned = draw(st.dictionaries(st.sampled_from(names), st.integers(0, 500))) if names else {}
    given = described_inputs({name: (shape, dtype) for name, shape, dtype in inputs})
    made = lay_out(spec, given, hints, BEGIN, learned=learned, most_rows=64)
    return Made(spec, given, hints, made)


def config_name(dtype: dtypes.DType) -> str:
    return "TYPE_STRING" if dtype is BYTES else f"TYPE_{dtype.name}"


def spans(of: Made) -> list[InputSpan | OutputSpan]:
    return [*of.layout.table.inputs.values(), *of.layout.table.outputs.values()]


@given(layouts(st.none() | st.integers(1, 64)))
def test_no_two_tensors_overlap_and_all_are_inside(made: Made) -> None:
    end = BEGIN
    for span in sorted(spans(made), key=lambda span: (span.offset, span.byte_size)):
        assert span.offset >= end
        assert span.byte_size >= 0
        end = span.offset + span.byte_size
    assert end <= made.layout.end
    check_outputs_are_apart(made.layout.table)


@given(layouts(st.none() | st.integers(1, 64)))
def test_every_tensor_begins_at_a_multiple_of_256(made: Made) -> None:
    assert [span.offset % 256 for span in spans(made)] == [0] * len(spans(made))


@given(layouts(st.none() | st.integers(1, 64)))
def test_less_than_256_bytes_per_tensor_are_lost(made: Made) -> None:
    assert made.layout.end - BEGIN < sum(span.byte_size for span in spans(made)) + 256 * (len(spans(made)) + 1)


@given(layouts(st.none() | st.integers(1, 64)))
def test_every_input_has_exactly_its_bytes(made: Made) -> None:
    for span in made.layout.table.inputs.values():
        if span.dtype is not BYTES:
            assert span.byte_size == math.prod(span.shape) * span.dtype.itemsize


@given(layouts(st.none() | st.integers(1, 64)))
def test_strings_have_the_same_room_each(made: Made) -> None:
    for name, span in made.layout.table.inputs.items():
        if span.dtype is BYTES:
            count = math.prod(span.shape)
            assert span.byte_size == made.given[name].byte_size
            assert count == 0 or (span.byte_size % count == 0 and span.byte_size // count > LENGTH_SIZE)


@given(layouts(st.none() | st.integers(1, 64)))
def test_room_that_the_configuration_knows_is_exact_unless_hinted(made: Made) -> None:
    hints = made.hints or {}
    for name, span in made.layout.table.outputs.items():
        known = made.spec.output(name).nbytes(made.layout.batch_size)
        if hints.get(name) is None and known is not None:
            assert span.byte_size == known
            assert name in made.layout.certain


@given(layouts(st.integers(1, 64)), st.integers(1, 64))
def test_the_rows_of_a_call_cover_it_without_gap_or_overlap(made: Made, at_once: int) -> None:
    whole = made.layout
    assert whole.batch_size is not None
    begins = range(0, whole.batch_size, at_once)
    parts = [rows_of(whole, begin, min(begin + at_once, whole.batch_size)) for begin in begins]
    assert sum(part.batch_size or 0 for part in parts) == whole.batch_size
    for name, span in whole.table.inputs.items():
        end = span.offset
        for part in parts:
            mine = part.table.inputs[name]
            assert mine.offset == end
            assert mine.shape == (part.batch_size, *span.shape[1:])
            assert mine.byte_size * whole.batch_size == span.byte_size * (part.batch_size or 0)
            end += mine.byte_size
        assert end == span.offset + span.byte_size
    for name, room in whole.table.outputs.items():
        end = room.offset
        for part in parts:
            assert part.table.outputs[name].offset == end
            end += part.table.outputs[name].byte_size
        assert room.offset + room.byte_size - whole.batch_size < end <= room.offset + room.byte_size
