"""Regions around an inference by plain tritonclient: made, filled, used, and gone, also after a failure at any step."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException, shared_memory

from shm_backend_utils import dtypes
from shm_backend_utils.compat.shm_util import (
    ShmLeakProbe,
    SystemShmHandle,
    cleanup_shm_regions,
    create_set_shm_regions,
    unregister_cleanup_shm_regions,
)
from shm_backend_utils.errors import MachineError
from shm_backend_utils.memory.segment import SystemSegment
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


class LostError(Exception):
    """What tests let happen."""


def fail_at(
    monkeypatch: pytest.MonkeyPatch, owner: Any, method: str, turn: int, *, is_done_first: bool = False
) -> None:
    """Let one call of a method fail, counted from 0: before it has done anything, or with its answer lost."""
    original, calls = getattr(owner, method), iter(range(100))

    def fail_or_call(*arguments: Any, **named: Any) -> Any:
        is_the_one = next(calls) == turn
        if is_the_one and not is_done_first:
            raise LostError
        result = original(*arguments, **named)
        if is_the_one:
            raise LostError
        return result

    monkeypatch.setattr(owner, method, fail_or_call)


# --- a failure while they are made


def registration_refused(wire: Wire, monkeypatch: pytest.MonkeyPatch, turn: int) -> None:
    fail_at(monkeypatch, wire.client, "register_system_shared_memory", turn)


def answers_lost(wire: Wire, monkeypatch: pytest.MonkeyPatch, turn: int) -> None:
    fail_at(monkeypatch, wire.client, "register_system_shared_memory", turn, is_done_first=True)


def names_not_freed(wire: Wire, monkeypatch: pytest.MonkeyPatch, turn: int) -> None:
    fail_at(monkeypatch, wire.client, "unregister_system_shared_memory", turn)


def memory_lacking(wire: Wire, monkeypatch: pytest.MonkeyPatch, turn: int) -> None:
    fail_at(monkeypatch, SystemSegment, "create", turn)


@pytest.mark.parametrize("turn", range(4))
@pytest.mark.parametrize("fault", [memory_lacking, names_not_freed, registration_refused, answers_lost])
def test_a_failure_at_any_region_leaves_nothing(
    wire: Wire, monkeypatch: pytest.MonkeyPatch, fault: Callable[[Wire, pytest.MonkeyPatch, int], None], turn: int
) -> None:
    with ShmLeakProbe(pool_prefix=None), monkeypatch.context() as patch:
        fault(wire, patch, turn)
        with pytest.raises(LostError):
            wire.four()
    assert wire.registered() == {}
    wire.clean_up(wire.four().shm_handles)  # the names are free again


@pytest.mark.parametrize("turn", range(2))
@pytest.mark.parametrize("step", ["write", "InferInput", "InferRequestedOutput"])
def test_a_failure_at_any_tensor_leaves_nothing(
    wire: Wire, monkeypatch: pytest.MonkeyPatch, step: str, turn: int
) -> None:
    with ShmLeakProbe(pool_prefix=None), monkeypatch.context() as patch:
        fail_at(patch, SystemShmHandle if step == "write" else MODULES[wire.protocol], step, turn)
        with pytest.raises(LostError):
            wire.four()
    assert wire.registered() == {}


def test_where_undoing_fails_too_the_first_failure_is_told_and_the_memory_is_given_back(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ShmLeakProbe(pool_prefix=None), monkeypatch.context() as patch:
        fail_at(patch, wire.client, "register_system_shared_memory", 2)
        unregister = wire.client.unregister_system_shared_memory
        asked: list[str] = []

        def refuse_the_second_time(name: str) -> None:
            if name in asked:
                raise ZeroDivisionError
            asked.append(name)
            unregister(name)

        patch.setattr(wire.client, "unregister_system_shared_memory", refuse_the_second_time)
        with pytest.raises(LostError):
            wire.four()
    assert set(wire.registered()) == {"a", "b"}
    wire.clean_up(wire.four().shm_handles)  # takes them over


def test_a_region_that_the_server_refuses_leaves_nothing(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    def register_what_is_not_there(handle: SystemShmHandle, client: Any) -> None:
        client.register_system_shared_memory(handle.name, "/nothing-of-this-name", handle.byte_size)

    with ShmLeakProbe(pool_prefix=None), monkeypatch.context() as patch:
        patch.setattr(SystemShmHandle, "_register_at", register_what_is_not_there)
        with pytest.raises(InferenceServerException, match="(?i)unable to open shared memory region"):
            wire.four()


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_without_a_server_nothing_is_left(protocol: str) -> None:
    client = MODULES[protocol].InferenceServerClient("127.0.0.1:1")
    with ShmLeakProbe(pool_prefix=None), pytest.raises(Exception, match="(?i)connect|refused|unavailable"):
        create_set_shm_regions([("X", X)], [], None, None, client, protocol)
    client.close()


# --- cleaning up


def test_it_leaves_what_others_have_registered_meanwhile(wire: Wire) -> None:
    first, second = wire.four(), wire.create([("IN_FP32", X)], [], ["theirs"])
    wire.clean_up(first.shm_handles)
    assert set(wire.registered()) == {"theirs"}
    successor = wire.four()
    wire.clean_up(first.shm_handles)  # they were unregistered: the names are not theirs any more
    assert set(wire.registered()) == {"theirs", "a", "b", "c", "d"}
    wire.clean_up([*second.shm_handles, *successor.shm_handles])


def test_what_is_gone_already_or_was_never_made_is_passed_over(wire: Wire) -> None:
    regions = wire.four()
    first, *others = regions.shm_handles
    wire.client.unregister_system_shared_memory("b")
    Path(f"/dev/shm{wire.registered()['c']}").unlink()
    wire.clean_up([first, None])
    wire.clean_up([None, *others])
    wire.clean_up(regions.shm_handles)
    wire.clean_up([])


def test_without_the_server_the_memory_alone_is_given_back(wire: Wire) -> None:
    with ShmLeakProbe(pool_prefix=None):
        regions = wire.four()
        cleanup_shm_regions(regions.shm_handles)
        cleanup_shm_regions(regions.shm_handles)
    assert set(wire.registered()) == {"a", "b", "c", "d"}
    wire.clean_up(regions.shm_handles)


@pytest.mark.parametrize("turn", range(4))
def test_a_region_that_cannot_be_unregistered_keeps_nothing_else(
    wire: Wire, monkeypatch: pytest.MonkeyPatch, turn: int
) -> None:
    with ShmLeakProbe(pool_prefix=None):
        regions = wire.four()
        with monkeypatch.context() as patch:
            fail_at(patch, wire.client, "unregister_system_shared_memory", turn)
            with pytest.raises(LostError):
                wire.clean_up(regions.shm_handles)
    assert set(wire.registered()) == {regions.shm_handles[turn].name}
    wire.clean_up(regions.shm_handles)


@pytest.mark.parametrize("turn", range(4))
def test_a_region_that_cannot_be_removed_keeps_nothing_else(
    wire: Wire, monkeypatch: pytest.MonkeyPatch, turn: int
) -> None:
    regions = wire.four()
    keys = list(map(wire.registered().__getitem__, "abcd"))
    with monkeypatch.context() as patch:
        fail_at(patch, SystemSegment, "unlink", turn)
        with pytest.raises(LostError):
            wire.clean_up(regions.shm_handles)
    assert wire.registered() == {}
    assert [key for key in keys if Path(f"/dev/shm{key}").exists()] == [keys[turn]]
    wire.clean_up(regions.shm_handles)
    assert not Path(f"/dev/shm{keys[turn]}").exists()


def test_of_several_failures_the_first_is_told(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    regions = wire.four()

    def fail(segment: SystemSegment) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        fail_at(patch, wire.client, "unregister_system_shared_memory", 1)
        patch.setattr(SystemSegment, "unlink", fail)
        with pytest.raises(LostError):
            wire.clean_up(regions.shm_handles)
    wire.clean_up(regions.shm_handles)
