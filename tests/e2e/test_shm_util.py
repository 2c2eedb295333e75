"""Regions around an inference by plain tritonclient: made, filled, registered, used, and gone again."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from typing import Final

import numpy as np
import pytest
from tritonclient.utils import shared_memory

from shm_backend_utils import dtypes
from shm_backend_utils.compat.shm_util import ShmLeakProbe, unregister_cleanup_shm_regions
from shm_backend_utils.errors import MachineError
from shm_backend_utils.server import EmbeddedServer

from .in_band import EACH_NUMBER, strings_in_band
from .shm_util_wire import COUNTS, MODULES, Wire, X, wire_to

WORDS: Final = np.array([["a", "bcd", ""], ["ü", "日本語", "ends with nothing\0"]], object)
ENCODED: Final = np.array([[word.encode() for word in row] for row in WORDS], object)


@pytest.fixture(params=["grpc", "http"])
def wire(request: pytest.FixtureRequest, triton_server: EmbeddedServer) -> Iterator[Wire]:
    with wire_to(triton_server, request.param) as wire:
        yield wire


# --- a whole life


@pytest.mark.parametrize("dtype", EACH_NUMBER)
def test_every_type_of_number_goes_in_and_comes_out(wire: Wire, dtype: dtypes.DType) -> None:
    values = np.array([1, 0, 2, 3, 1]).astype(dtype.numpy)
    shm_handles, inputs, outputs = wire.create(
        [(f"IN_{dtype.name}", values)], [(f"OUT_{dtype.name}", values.nbytes)], ["x", "y"], [values.nbytes] * 2
    )
    try:
        wire.client.infer("every_dtype", inputs, outputs=outputs)
        assert shm_handles[0].read(dtype.numpy, [5]).tolist() == values.tolist()
        assert shm_handles[1].read(dtype.numpy, [5]).tolist() == values[::-1].tolist()
    finally:
        unregister_cleanup_shm_regions(shm_handles, wire.client, wire.protocol)


def test_a_region_may_be_larger_than_its_tensor(wire: Wire) -> None:
    regions = wire.create([("IN_FP32", X)], [("OUT_FP32", 20)], ["x", "y"], [4096, 5000])
    wire.infer("every_dtype", regions)
    assert [handle.byte_size for handle in regions.shm_handles] == [4096, 5000]
    assert regions.shm_handles[1].read(np.float32, 6).tolist() == [*X[::-1], 0]
    wire.clean_up(regions.shm_handles)


def test_inputs_without_names_and_regions_without_names_get_some(wire: Wire) -> None:
    images = np.random.default_rng(1).random((2, 3, 224, 224), np.float32)
    regions = wire.create([images], [("OUTPUT0", images.nbytes)])
    assert set(wire.registered()) == {"input0", "output0"}
    wire.infer("multiply", regions)
    np.testing.assert_array_equal(regions.shm_handles[1].read(images.dtype, images.shape), images * 2)
    wire.clean_up(regions.shm_handles)


@pytest.mark.parametrize("count", [1, 3])
def test_a_list_of_arrays_is_their_rows_and_of_one_the_tensor_itself(wire: Wire, count: int) -> None:
    images = np.random.default_rng(1).random((count, 3, 224, 224), np.float32)
    regions = wire.create([("INPUT0", [images] if count == 1 else list(images))], [("OUTPUT0", images.nbytes)])
    wire.infer("multiply", regions)
    np.testing.assert_array_equal(regions.shm_handles[1].read(images.dtype, images.shape), images * 2)
    wire.clean_up(regions.shm_handles)


def test_a_tensor_without_elements(wire: Wire) -> None:
    regions = wire.create([("IN_FP32", X[:0]), ("IN_INT32", COUNTS)], [("OUT_FP32", 4), ("OUT_INT32", 12)])
    wire.infer("every_dtype", regions)
    assert regions.shm_handles[0].read(np.float32, (0,)).tolist() == []
    assert regions.shm_handles[3].read(np.int32, 3).tolist() == COUNTS[::-1].tolist()
    wire.clean_up(regions.shm_handles)


def test_runs_under_the_same_names_leave_nothing_and_let_no_pool_grow(wire: Wire) -> None:
    def run() -> None:
        regions = wire.four()
        wire.infer("every_dtype", regions)
        wire.clean_up(regions.shm_handles)

    run()  # a pool may grow for the first request
    with ShmLeakProbe(wire.server.shm_prefix):
        run()
        run()


def test_a_name_that_an_aborted_run_has_left_is_taken_over(wire: Wire) -> None:
    key = f"/aborted-{secrets.token_hex(4)}"
    aborted = shared_memory.create_shared_memory_region("a", key, 64, create_only=True)
    wire.client.register_system_shared_memory("a", key, 64)
    shared_memory.destroy_shared_memory_region(aborted)
    regions = wire.four()
    assert wire.registered()["a"] != key
    wire.infer("every_dtype", regions)
    assert regions.shm_handles[2].read(np.float32, 5).tolist() == X[::-1].tolist()
    wire.clean_up(regions.shm_handles)


# --- strings


@strings_in_band
def test_strings_by_tritons_own_shared_memory(wire: Wire) -> None:
    regions = wire.create([("WORDS", WORDS)], [("LOUD", 200), ("LENGTHS", 24)])
    wire.infer("words", regions)
    loud, lengths = regions.shm_handles[1].read(object, (2, 3)), regions.shm_handles[2].read(np.int32, (2, 3))
    wire.clean_up(regions.shm_handles)
    assert loud.tolist() == [[word.upper() for word in row] for row in ENCODED]
    assert lengths.tolist() == [[len(word) for word in row] for row in ENCODED]


def test_strings_on_the_direct_path_by_the_names_of_the_regions(wire: Wire) -> None:
    shm_handles, _, _ = wire.create([("WORDS", WORDS)], [("LOUD", 200), ("LENGTHS", 24)])
    descriptor = {
        "v": 1,
        "model": "words",
        "regions": [{"kind": "named", "name": handle.name} for handle in shm_handles],
        "inputs": {"WORDS": [0, 0, shm_handles[0].byte_size, "BYTES", WORDS.shape]},
        "outputs": {"LOUD": [1, 0, 200], "LENGTHS": [2, 0, 24]},
    }
    outputs = [MODULES[wire.protocol].InferRequestedOutput(name) for name in ("LOUD", "LENGTHS")]
    wire.client.infer("words", [], outputs=outputs, parameters={"shm_io": json.dumps(descriptor)})
    loud, lengths = shm_handles[1].read(object, (2, 3)), shm_handles[2].read(np.int32, (2, 3))
    wire.clean_up(shm_handles)
    assert loud.tolist() == [[word.upper() for word in row] for row in ENCODED]
    assert lengths.tolist() == [[len(word) for word in row] for row in ENCODED]


# --- what the machine cannot do


def test_a_region_that_has_no_room_is_an_error_and_no_crash(wire: Wire) -> None:
    with ShmLeakProbe(pool_prefix=None), pytest.raises(MachineError, match="/dev/shm has [0-9]+ free"):
        wire.create([("X", X)], [("Y", 20)], None, [4096, 2**45])
