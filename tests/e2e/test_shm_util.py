"""Regions around an inference by plain tritonclient: made, filled, used, and gone, also after a failure at any step."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tritonclient.utils import shared_memory

from shm_backend_utils.compat.shm_util import (
    ShmLeakProbe,
    SystemShmHandle,
    cleanup_shm_regions,
)
from shm_backend_utils.errors import MachineError
from shm_backend_utils.memory.segment import SystemSegment
from shm_backend_utils.server import EmbeddedServer

from .shm_util_wire import MODULES, Wire, X, wire_to


@pytest.fixture
def wire(protocol: str, triton_server: EmbeddedServer) -> Iterator[Wire]:
    with wire_to(triton_server, protocol) as wire:
        yield wire


# --- a whole life


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
