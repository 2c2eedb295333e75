"""What holds for the layout of every call; and the form of usual tables against the general way of reading them."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shm_backend_utils import dtypes
from shm_backend_utils.client.inputs.sources import described_inputs
from shm_backend_utils.dtypes import BYTES, LENGTH_SIZE
from shm_backend_utils.errors import ShmError
from shm_backend_utils.model.call.checks import check_table
from shm_backend_utils.model.mapping.memory import HostMemory
from shm_backend_utils.model_spec import ModelSpec
from shm_backend_utils.protocol import table
from shm_backend_utils.protocol.call_layout import CallInput, CallLayout, lay_out, record_byte_size, rows_of
from shm_backend_utils.protocol.form import TableForm
from shm_backend_utils.protocol.layout import data_offset
from shm_backend_utils.protocol.spans import InputSpan, OutputSpan, Table
from tests.property.random_tables import mutated

BEGIN, BYTE_SIZE, RECORD = 4096, 2**16, 1024
MEMORY: Final = [HostMemory(np.zeros(BYTE_SIZE, np.uint8))]

letters = st.text("abé_", min_size=1, max_size=9)
dims = st.lists(st.sampled_from([-1, -1, 1, 2, 3]), min_size=1, max_size=3)
of_numbers = st.sampled_from(["TYPE_FP32", "TYPE_FP64", "TYPE_UINT8", "TYPE_BF16", "TYPE_INT64", "TYPE_BOOL"])
of_any = st.one_of(of_numbers, st.just("TYPE_STRING"))


def tensors(data_types: st.SearchStrategy[str]) -> st.SearchStrategy[list[dict[str, Any]]]:
    tensor = st.fixed_dictionaries({"name": letters, "data_type": data_types, "dims": dims})
    return st.lists(tensor, min_size=1, max_size=3, unique_by=lambda each: each["name"])


specs = st.builds(
    lambda inputs, outputs, most: ModelSpec.from_config(
        {"name": "m", "max_batch_size": most, "input": inputs, "output": outputs}
    ),
    tensors(of_numbers),
    tensors(of_any),
    st.sampled_from([0, 0, 4]),
)


def laid_out(spec: ModelSpec, rng: random.Random) -> CallLayout:
    """Return a random call that the model takes, with rooms of any size."""
    rows = rng.randint(1, max(spec.max_batch_size, 1))
    inputs = {}
    for name, tensor in spec.inputs.items():
        assert tensor.dtype is not None
        shape = tuple([rng.choice([0, 1, 2, 3, 4, 5, 5]) if size < 0 else size for size in tensor.shape])
        shape = (rows, *shape[1:]) if spec.max_batch_size else shape
        inputs[name] = CallInput(tensor.dtype, shape, int(np.prod(shape)) * tensor.dtype.itemsize)
    names = rng.sample(list(spec.outputs), rng.randint(0, len(spec.outputs)))
    wanted = {name: rng.choice([None, 0, 8, 100]) for name in names}
    return lay_out(spec, inputs, wanted, BEGIN, learned={}, most_rows=spec.max_batch_size)


def moved(rng: random.Random, record: bytes, said: Table) -> bytes:
    inputs, outputs = dict(said.inputs), dict(said.outputs)
    name, distance = rng.choice([*inputs, *outputs]), rng.choice([-256, -8, -4, -1, 1, 2, 4, 8, 256])
    spans: Any = inputs if name in inputs else outputs
    spans[name] = spans[name]._replace(offset=spans[name].offset + distance)
    return record[:8] + table.encode(Table(inputs, outputs)).ljust(RECORD - 8, b"\0")


def read_generally(spec: ModelSpec, record: bytes) -> tuple[int, Table] | None:
    try:
        found = table.decode(record, BEGIN, BYTE_SIZE)
        check_table(spec, found[1], MEMORY)
    except ShmError:
        return None
    return found


@given(specs, st.randoms(use_true_random=False), st.integers(1, 2**63))
def test_changes_of_a_usual_table_are_read_alike(spec: ModelSpec, rng: random.Random, generation: int) -> None:
    form, layout = TableForm.of(spec), laid_out(spec, rng)
    assert form is not None
    record = generation.to_bytes(8, "little") + table.encode(layout.table)
    length = len(record)
    record = record.ljust(RECORD, b"\0")
    is_usual = all(span.byte_size for span in layout.table.inputs.values())
    usual = layout.table._replace(fits=True) if is_usual else None
    assert form.decode(record, generation, BEGIN, BYTE_SIZE) == usual
    assert form.decode(record, generation - 1, BEGIN, BYTE_SIZE) is None
    assert read_generally(spec, record) == (generation, layout.table)
    changes = [mutated(rng, record, 0, length) for _ in range(10)]
    changes += [moved(rng, record, layout.table) for _ in range(10)]
    changes += [record[:8] + other.to_bytes(4, "little") + record[12:] for other in (length - 8, length + 8)]
    outputs = len(layout.table.outputs)
    changes += [record[:14] + count.to_bytes(2, "little") + record[16:] for count in {outputs + 1, abs(outputs - 1)}]
    for changed in [*changes, record[: length - 1]]:
        found, generally = form.decode(changed, generation, BEGIN, BYTE_SIZE), read_generally(spec, changed)
        if found is not None:
            assert generally == (generation, found._replace(fits=False))


sizes = st.lists(st.integers(0, 50), max_size=3)
data_types = st.sampled_from(list(dtypes.BY_NAME.values()))
NO_GPU: st.SearchStrategy[int | None] = st.none()


class Call(NamedTuple):
    """A call, and how it was laid out."""

    spec: ModelSpec
    inputs: Mapping[str, CallInput]
    hints: Mapping[str, int | None] | None
    begin: int
    made: CallLayout


@st.composite
def calls(
    draw: st.DrawFn, rows: st.SearchStrategy[int | None], devices: st.SearchStrategy[int | None] = NO_GPU
) -> Call:
    """Calls of any model, with hints for some outputs, some learned, and maybe tensors on GPUs."""
    row_count = draw(rows)
    batch = [] if row_count is None else [row_count]
    config_inputs, config_outputs = [], []
    given: dict[str, CallInput] = {}
    for index in range(draw(st.integers(1, 4))):
        dtype, dims = draw(data_types), draw(sizes)
        config_inputs.append({"name": f"I{index}", "data_type": config_name(dtype), "dims": [-1] * len(dims)})
        kind = f"S{draw(st.integers(1, 50))}" if dtype is BYTES else dtype.numpy
        one = described_inputs({f"I{index}": ((*batch, *dims), np.dtype(kind))})[f"I{index}"]
        assert isinstance(one, CallInput)
        given[f"I{index}"] = one if dtype is BYTES else one._replace(device=draw(devices))
    on_devices: dict[str, int] = {}
    for index in range(draw(st.integers(0, 4))):
        dims, dtype = [draw(st.sampled_from([size, -1])) for size in draw(sizes)], draw(data_types)
        config_outputs.append({"name": f"O{index}", "data_type": config_name(dtype), "dims": dims})
        device = draw(devices)
        if device is not None and dtype is not BYTES:
            on_devices[f"O{index}"] = device
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
    begin = data_offset(draw(st.integers(1, 5)), record_byte_size(spec))
    made = lay_out(spec, given, hints, begin, learned=learned, most_rows=64, output_devices=on_devices)
    return Call(spec, given, hints, begin, made)


def config_name(dtype: dtypes.DType) -> str:
    return "TYPE_STRING" if dtype is BYTES else f"TYPE_{dtype.name}"


def spans(of: CallLayout) -> list[InputSpan | OutputSpan]:
    return [*of.table.inputs.values(), *of.table.outputs.values()]


any_call = calls(st.none() | st.integers(1, 64), st.none() | st.integers(0, 2))
on_the_host = calls(st.none() | st.integers(1, 64))


@given(any_call)
def test_no_two_tensors_overlap_and_all_are_inside_where_they_may_begin(call: Call) -> None:
    made, there = call.made, spans(call.made)
    ends = {0: call.begin} | {1 + index: 0 for index in range(len(made.devices))}
    for span in sorted(there, key=lambda span: (span.region, span.offset, span.byte_size)):
        assert span.offset >= ends[span.region]
        assert span.byte_size >= 0
        assert span.offset % 256 == 0
        ends[span.region] = span.offset + span.byte_size
    assert ends.pop(0) <= made.end
    assert all(end <= room for end, room in zip(ends.values(), made.device_byte_sizes, strict=True))
    room = made.end - call.begin + sum(made.device_byte_sizes)
    assert room < sum(span.byte_size for span in there) + 256 * (len(there) + 1 + len(made.devices)), "what is lost"


@given(any_call)
def test_every_tensor_has_its_bytes_in_the_memory_of_its_device(call: Call) -> None:
    made, hints = call.made, call.hints or {}
    assert made.table.inputs.keys() == call.inputs.keys()
    for name, span in made.table.inputs.items():
        count = math.prod(span.shape)
        assert (span.dtype, span.shape, span.byte_size) == call.inputs[name][:3]
        assert (None if span.region == 0 else made.devices[span.region - 1]) == call.inputs[name].device
        if span.dtype is not BYTES:
            assert span.byte_size == count * span.dtype.itemsize
        else:
            assert count == 0 or (span.byte_size % count == 0 and span.byte_size // count > LENGTH_SIZE)
    for name, room in made.table.outputs.items():
        known = call.spec.output(name).row_byte_size
        if hints.get(name) is None and known is not None:
            assert room.byte_size == known * (call.made.batch_size or 1)
            assert name in made.certain


@given(on_the_host)
def test_the_model_reads_what_was_laid_out(call: Call) -> None:
    """Whatever a client lays out, the other side's checks let it pass."""
    half = record_byte_size(call.spec) // 2
    encoded = bytes(8) + table.encode(call.made.table)
    assert len(encoded) <= half
    assert table.decode(encoded.ljust(half, b"\0"), call.begin, call.made.end) == (0, call.made.table)


@given(calls(st.integers(1, 64), st.none() | st.integers(0, 2)), st.integers(1, 64))
def test_the_rows_of_a_call_cover_it_without_gap_or_overlap(call: Call, at_once: int) -> None:
    whole = call.made
    assert whole.batch_size is not None
    begins = range(0, whole.batch_size, at_once)
    parts = [rows_of(whole, call.spec, begin, min(begin + at_once, whole.batch_size)) for begin in begins]
    assert sum(part.batch_size or 0 for part in parts) == whole.batch_size
    for name, span in whole.table.inputs.items():
        end = span.offset
        for part in parts:
            mine = part.table.inputs[name]
            assert (mine.region, mine.offset) == (span.region, end)
            assert mine.shape == (part.batch_size, *span.shape[1:])
            assert mine.byte_size * whole.batch_size == span.byte_size * (part.batch_size or 0)
            end += mine.byte_size
        assert end == span.offset + span.byte_size
    for name, room in whole.table.outputs.items():
        end, dtype = room.offset, call.spec.output(name).dtype
        element = 1 if dtype is None else dtype.itemsize or 1
        for part in parts:
            assert part.table.outputs[name].offset % element == 0
            assert (part.table.outputs[name].region, part.table.outputs[name].offset) == (room.region, end)
            end += part.table.outputs[name].byte_size
        assert room.offset + room.byte_size - whole.batch_size * element < end <= room.offset + room.byte_size
