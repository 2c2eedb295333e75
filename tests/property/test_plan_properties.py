"""What holds for the layout of every call."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shm_backend_utils import dtypes
from shm_backend_utils.client.plan import CallPlan, plan, rows_of, signature
from shm_backend_utils.dtypes import BYTES, LENGTH_SIZE
from shm_backend_utils.model_spec import ModelSpec
from shm_backend_utils.protocol.descriptor import InputSpan, OutputSpan

sizes = st.lists(st.integers(0, 50), max_size=3)
data_types = st.sampled_from(list(dtypes.BY_NAME.values()))


@st.composite
def plans(draw: st.DrawFn, rows: st.SearchStrategy[int | None]) -> CallPlan:
    """Plans of calls of any model, with hints for some outputs, and some learned."""
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
    return plan(spec, signature({name: (shape, dtype) for name, shape, dtype in inputs}, hints), learned, most_rows=64)


def config_name(dtype: dtypes.DType) -> str:
    return "TYPE_STRING" if dtype is BYTES else f"TYPE_{dtype.name}"


def spans(of: CallPlan) -> list[InputSpan | OutputSpan]:
    return [*of.inputs.values(), *of.outputs.values()]


@given(plans(st.none() | st.integers(1, 64)))
def test_no_two_tensors_overlap_and_all_are_inside(made: CallPlan) -> None:
    end = 0
    for span in sorted(spans(made), key=lambda span: (span.offset, span.byte_size)):
        assert span.offset >= end
        assert span.byte_size >= 0
        end = span.offset + span.byte_size
    assert end <= made.byte_size


@given(plans(st.none() | st.integers(1, 64)))
def test_every_tensor_begins_at_a_multiple_of_256(made: CallPlan) -> None:
    assert [span.offset % 256 for span in spans(made)] == [0] * len(spans(made))


@given(plans(st.none() | st.integers(1, 64)))
def test_less_than_256_bytes_per_tensor_are_lost(made: CallPlan) -> None:
    assert made.byte_size < sum(span.byte_size for span in spans(made)) + 256 * (len(spans(made)) + 1)


@given(plans(st.none() | st.integers(1, 64)))
def test_every_input_has_exactly_its_bytes(made: CallPlan) -> None:
    for name, span in made.inputs.items():
        if name not in made.strings:
            assert span.byte_size == math.prod(span.shape) * span.dtype.itemsize


@given(plans(st.none() | st.integers(1, 64)))
def test_strings_have_the_same_room_each(made: CallPlan) -> None:
    room = dict(made.signature.string_sizes)
    assert made.strings == set(room)
    for name in made.strings:
        span, count = made.inputs[name], math.prod(made.inputs[name].shape)
        assert span.byte_size == room[name]
        assert count == 0 or (span.byte_size % count == 0 and span.byte_size // count > LENGTH_SIZE)


@given(plans(st.none() | st.integers(1, 64)))
def test_room_that_the_configuration_knows_is_exact_unless_hinted(made: CallPlan) -> None:
    hints = dict(made.signature.outputs or ())
    for name, span in made.outputs.items():
        known = made.spec.output(name).nbytes(made.batch_size)
        if hints.get(name) is None and known is not None:
            assert span.byte_size == known
            assert name in made.certain


@given(plans(st.integers(1, 64)), st.integers(1, 64))
def test_the_rows_of_a_call_cover_it_without_gap_or_overlap(whole: CallPlan, at_once: int) -> None:
    assert whole.batch_size is not None
    begins = range(0, whole.batch_size, at_once)
    parts = [rows_of(whole, begin, min(begin + at_once, whole.batch_size), whole.signature) for begin in begins]
    assert sum(part.batch_size or 0 for part in parts) == whole.batch_size
    for name, span in whole.inputs.items():
        end = span.offset
        for part in parts:
            mine = part.inputs[name]
            assert mine.offset == end
            assert mine.shape == (part.batch_size, *span.shape[1:])
            assert mine.byte_size * whole.batch_size == span.byte_size * (part.batch_size or 0)
            end += mine.byte_size
        assert end == span.offset + span.byte_size
    for name, room in whole.outputs.items():
        end = room.offset
        for part in parts:
            assert part.outputs[name].offset == end
            end += part.outputs[name].byte_size
        assert room.offset + room.byte_size - whole.batch_size < end <= room.offset + room.byte_size
