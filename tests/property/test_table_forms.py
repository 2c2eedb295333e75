"""The form of usual tables against the general way of reading them: they never differ."""

from __future__ import annotations

import random
from typing import Any, Final

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shm_backend_utils.errors import ShmError
from shm_backend_utils.model.call.received import check_table
from shm_backend_utils.model.mapping.memory import HostMemory
from shm_backend_utils.model_spec import ModelSpec
from shm_backend_utils.protocol import table
from shm_backend_utils.protocol.call_layout import CallInput, CallLayout, lay_out
from shm_backend_utils.protocol.form import TableForm
from shm_backend_utils.protocol.spans import Table
from tests.property.fuzz_tables import mutated

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
    """Return a record whose table has one tensor a little elsewhere."""
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
def test_a_usual_table_has_the_form_and_what_changes_it_is_read_generally_or_alike(
    spec: ModelSpec, rng: random.Random, generation: int
) -> None:
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
    for changed in [*changes, record[: length - 1]]:
        found, generally = form.decode(changed, generation, BEGIN, BYTE_SIZE), read_generally(spec, changed)
        if found is not None:
            assert generally == (generation, found._replace(fits=False))


def test_strings_have_no_form() -> None:
    strings = {"name": "s", "data_type": "TYPE_STRING", "dims": [-1]}
    assert TableForm.of(ModelSpec.from_config({"name": "m", "input": [strings], "output": [strings]})) is None
