"""Results that are read by their expected form against the general way of reading them."""

from __future__ import annotations

import math
import random

from hypothesis import given
from hypothesis import strategies as st

from shm_backend_utils.model_spec import ModelSpec
from shm_backend_utils.protocol import results
from shm_backend_utils.protocol.call_layout import aligned
from shm_backend_utils.protocol.results import OutputPlace, read_expected
from shm_backend_utils.protocol.table import TensorForm
from tests.property.random_tables import mutated
from tests.property.test_table_forms import BEGIN, RECORD, specs

END, GENERATION = 2**15, 7


def record_of(spec: ModelSpec, rng: random.Random) -> bytes:
    """Return results of outputs that are numbers, in the configuration's order, one behind the other."""
    places, at = [], BEGIN
    for name, tensor in spec.outputs.items():
        assert tensor.dtype is not None
        shape = tuple([rng.randint(1, 4) if size < 0 else size for size in tensor.shape])
        byte_size = math.prod(shape) * tensor.dtype.itemsize
        places.append(OutputPlace(name, tensor.dtype, shape, 0, at, byte_size, is_in_response=False))
        at = aligned(at + byte_size)
    stamps = GENERATION.to_bytes(8, "little") * 2
    return (stamps + results.encode(places)).ljust(RECORD, b"\0")


@given(specs, st.randoms(use_true_random=False))
def test_expected_results_are_read_as_all_are(spec: ModelSpec, rng: random.Random) -> None:
    forms = TensorForm.of_all(spec.outputs)
    if len(forms) < len(spec.outputs):
        return
    whole = record_of(spec, rng)
    assert read_expected(whole, GENERATION, BEGIN, END, spec.outputs, forms) is not None
    for _ in range(20):
        record = mutated(rng, whole, 0, len(whole.rstrip(b"\0")))
        found = read_expected(record, GENERATION, BEGIN, END, spec.outputs, forms)
        if found is not None:
            outputs, events, _ = results.decode(record, [END], BEGIN, spec, GENERATION)
            assert [each for each in outputs if each.region or each.is_in_response] == []
            assert {each.name: (each.dtype, each.shape, each.offset) for each in outputs} == found
            assert (list(found), events) == (list(spec.outputs), ())
