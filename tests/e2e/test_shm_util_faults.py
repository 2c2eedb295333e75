"""A failure at any step of making regions, or of giving them back: nothing is left, and the rest is done."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tritonclient.utils import InferenceServerException

from shm_backend_utils.compat.shm_util import ShmLeakProbe, SystemShmHandle, cleanup_shm_regions, create_set_shm_regions
from shm_backend_utils.memory.segment import SystemSegment
from shm_backend_utils.server import EmbeddedServer

from .shm_util_wire import MODULES, Wire, X, wire_to


@pytest.fixture(params=["grpc", "http"])
def wire(request: pytest.FixtureRequest, triton_server: EmbeddedServer) -> Iterator[Wire]:
    with wire_to(triton_server, request.param) as wire:
        yield wire


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
