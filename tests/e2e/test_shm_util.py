"""Regions around an inference by plain tritonclient: made, filled, used, and gone, also after a failure at any step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException, shared_memory

from shm_backend_utils.client.paths.triton_shm import unregister_when_free
from shm_backend_utils.compat import shm_util as su
from shm_backend_utils.compat.shm_util import (
    ShmLeakProbe,
    ShmRegions,
    SystemShmHandle,
    cleanup_shm_regions,
    create_set_shm_regions,
    unregister_cleanup_shm_regions,
)
from shm_backend_utils.errors import MachineError
from shm_backend_utils.memory.segment import SystemSegment
from shm_backend_utils.server import EmbeddedServer

from .plain_client import PlainClient, PlainRegion

X: Final = np.arange(1, 6, dtype=np.float32)
COUNTS: Final = np.arange(3, dtype=np.int32)
A: Final = np.arange(16, dtype=np.int32).reshape(1, 16)
B: Final = np.ones((1, 16), np.int32)
EXPECTED: Final = {"OUTPUT0": A + B, "OUTPUT1": A - B}
SHM: Final = Path("/dev/shm")


class Wire(PlainClient):
    """One that makes its regions by ``shm_util``; none is left registered at its end."""

    def __init__(self, protocol: str, server: EmbeddedServer) -> None:
        super().__init__(protocol, server)
        self.server = server
        self._of_others = self._known()

    def create(self, inputs: Any, outputs: Any, names: Any = None, sizes: Any = None) -> ShmRegions:
        return create_set_shm_regions(inputs, outputs, names, sizes, self.client, self.protocol)

    def four(self, names: Any = ("a", "b", "c", "d")) -> ShmRegions:
        return self.create([("IN_FP32", X), ("IN_INT32", COUNTS)], [("OUT_FP32", 20), ("OUT_INT32", 12)], names)

    def clean_up(self, handles: Any) -> None:
        unregister_cleanup_shm_regions(handles, self.client, self.protocol)

    def infer(self, model: str, regions: ShmRegions) -> Any:
        return self.client.infer(model, regions.inputs, outputs=regions.outputs)

    def registered(self) -> dict[str, str]:
        """Return the key of each name that the server knows, but for those that were there before."""
        return {name: key for name, key in self._known().items() if name not in self._of_others}

    def _known(self) -> dict[str, str]:
        status = self.client.get_system_shared_memory_status()
        if self.protocol == "grpc":
            return {name: region.key for name, region in status.regions.items()}
        return {region["name"]: region["key"] for region in status}

    def close(self) -> None:
        left = self.registered()
        for name in left:
            self.client.unregister_system_shared_memory(name)
        super().close()
        assert left == {}


@pytest.fixture
def wire(protocol: str, triton_server: EmbeddedServer) -> Iterator[Wire]:
    with contextlib.closing(Wire(protocol, triton_server)) as wire:
        yield wire


def test_names_may_be_left_out_and_a_list_of_arrays_is_their_rows_and_of_one_the_tensor_itself(wire: Wire) -> None:
    images = np.random.default_rng(1).random((3, 3, 224, 224), np.float32)
    for given, expected in ((images, images), (("INPUT0", list(images)), images), (("INPUT0", [images]), images)):
        regions = wire.create([given], [("OUTPUT0", images.nbytes)])
        assert set(wire.registered()) == {"input0", "output0"}
        wire.infer("multiply", regions)
        np.testing.assert_array_equal(regions.shm_handles[1].read(images.dtype, images.shape), expected * 2)
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
    aborted = PlainRegion(64)
    wire.client.register_system_shared_memory("a", aborted.key, 64)
    aborted.destroy()
    regions = wire.four()
    assert wire.registered()["a"] != aborted.key
    wire.infer("every_dtype", regions)
    assert regions.shm_handles[2].read(np.float32, 5).tolist() == X[::-1].tolist()
    wire.clean_up(regions.shm_handles)


def test_a_region_that_has_no_room_is_an_error_and_no_crash(wire: Wire) -> None:
    with ShmLeakProbe(pool_prefix=None), pytest.raises(MachineError, match="/dev/shm has [0-9]+ free"):
        wire.create([("X", X)], [("Y", 20)], None, [4096, 2**45])


class LostError(Exception): ...


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


FAULTS: Final[dict[str, tuple[Callable[[Wire], Any], str, int]]] = {
    "no memory": (lambda wire: SystemSegment, "create", 4),
    "names are not freed": (lambda wire: wire.client, "unregister_system_shared_memory", 4),
    "registration is refused": (lambda wire: wire.client, "register_system_shared_memory", 4),
    "answers are lost": (lambda wire: wire.client, "register_system_shared_memory", 4),
    "no input": (lambda wire: wire.module, "InferInput", 2),
    "no output": (lambda wire: wire.module, "InferRequestedOutput", 2),
    "nothing is written": (lambda wire: SystemShmHandle, "write", 2),
}
"""What fails, and at how many places."""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failure_at_any_region_leaves_nothing(wire: Wire, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    owner, method, turns = FAULTS[fault]
    for turn in range(turns):
        with ShmLeakProbe(pool_prefix=None), monkeypatch.context() as patch:
            fail_at(patch, owner(wire), method, turn, is_done_first=fault == "answers are lost")
            with pytest.raises(LostError):
                wire.four()
        assert wire.registered() == {}
        wire.clean_up(wire.four().shm_handles)  # the names are free again


def test_where_undoing_fails_too_the_first_failure_is_told(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_region_that_stays_registered_keeps_no_other(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    for turn in range(4):
        with ShmLeakProbe(pool_prefix=None):
            regions = wire.four()
            with monkeypatch.context() as patch:
                fail_at(patch, wire.client, "unregister_system_shared_memory", turn)
                with pytest.raises(LostError):
                    wire.clean_up(regions.shm_handles)
        assert set(wire.registered()) == {regions.shm_handles[turn].name}
        wire.clean_up(regions.shm_handles)


# Where shm_util is called as Triton's own tests call it: in the order of infer_util.


@pytest.fixture
def upstream(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> Wire:
    monkeypatch.setenv("TRITONSERVER_IPADDR", wire.server.http_url)
    return wire


def inputs_of(wire: Wire) -> list[Any]:
    return [wire.module.InferInput(name, [1, 16], "INT32") for name in ("INPUT0", "INPUT1")]


def infer(upstream: Wire, names: Any, outputs: Collection[str], precreated: Any = None) -> dict[str, Any]:
    """Do what ``infer_util.infer_exact`` does around its inference, with its calls; return the outputs."""
    regions, handles = su.create_set_shm_regions([A], [B], A.nbytes, A.nbytes, outputs, names, precreated, True, False)
    try:
        inputs = inputs_of(upstream)
        size = A.nbytes
        su.register_add_shm_regions(
            inputs, outputs, regions, precreated, handles, size, size, size, size, True, False, upstream.client
        )
        asked = []
        for place, name in enumerate(sorted(outputs)):
            asked.append(upstream.module.InferRequestedOutput(name))
            asked[-1].set_shared_memory(f"{regions[2 + place]}_data", A.nbytes)
        upstream.client.infer("add_sub", inputs, outputs=asked)
        found = {"OUTPUT0": handles[2], "OUTPUT1": handles[3]}
        assert [name for name, handle in found.items() if handle is not None] == sorted(outputs)
        return {
            name: shared_memory.get_contents_as_numpy(handle, np.int32, [1, 16]).tolist()
            for name, handle in found.items()
            if handle is not None
        }
    finally:
        su.unregister_cleanup_shm_regions(regions, handles, precreated, outputs, True, False)


def is_gone(*names: str) -> bool:
    return not any((SHM / name).exists() for name in names)


@pytest.mark.parametrize("names", [None, ["upstream_a", "upstream_b", "upstream_c", "upstream_d"]], ids=["", "own"])
def test_two_inputs_and_the_outputs_wanted(upstream: Wire, names: list[str] | None) -> None:
    for outputs in (["OUTPUT0", "OUTPUT1"], ["OUTPUT0"], ["OUTPUT1"]):
        assert infer(upstream, names, outputs) == {name: EXPECTED[name].tolist() for name in outputs}
        assert is_gone(*(names or ["input0", "input1", "output0", "output1"]))


def test_regions_that_were_made_before_stay_the_callers(upstream: Wire) -> None:
    names = [f"precreated{number}" for number in range(4)]
    before = [shared_memory.create_shared_memory_region(f"{name}_data", f"/{name}", A.nbytes) for name in names[2:]]
    for name in names[2:]:
        upstream.client.register_system_shared_memory(f"{name}_data", f"/{name}", A.nbytes)
    found = infer(upstream, names, ["OUTPUT0", "OUTPUT1"], before)
    assert found == {name: value.tolist() for name, value in EXPECTED.items()}
    for name, handle in zip(names[2:], before, strict=True):
        unregister_when_free(partial(upstream.client.unregister_system_shared_memory, f"{name}_data"))
        shared_memory.destroy_shared_memory_region(handle)
    assert is_gone(*names)


def test_one_input_and_one_output(upstream: Wire) -> None:
    """As ``infer_util.infer_zero`` does, for a model whose tensors are many alike."""
    names = ("either_in0", "either_out0")
    handles = su.create_set_either_shm_region([*names], [A], A.nbytes, A.nbytes, True, False)
    inputs = inputs_of(upstream)
    outputs = [upstream.module.InferRequestedOutput("OUTPUT0")]
    of_all = (["either_in", "either_out"], ([handles[0]], [handles[1]]), 0, A.nbytes, A.nbytes)
    su.register_add_either_shm_regions(inputs, outputs, *of_all, True, False, upstream.client)
    inputs[1].set_data_from_numpy(B)
    upstream.client.infer("add_sub", inputs, outputs=outputs)
    assert shared_memory.get_contents_as_numpy(handles[1], np.int32, [1, 16]).tolist() == (A + B).tolist()
    for name, handle in zip(names, handles, strict=True):
        unregister_when_free(partial(upstream.client.unregister_system_shared_memory, f"{name}_data"))
        shared_memory.destroy_shared_memory_region(handle)
    assert is_gone(*names)


def test_what_fails_at_cleaning_up_keeps_nothing_else(upstream: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    regions, handles = su.create_set_shm_regions([A], [B], 64, 64, ["OUTPUT0"], None, None, True, False)
    inputs = inputs_of(upstream)
    su.register_add_shm_regions(
        inputs, ["OUTPUT0"], regions, None, handles, 64, 64, 64, 64, True, False, upstream.client
    )
    destroy = shared_memory.destroy_shared_memory_region

    def fails_after(handle: Any) -> None:
        destroy(handle)
        if handle is handles[1]:
            raise OSError("it is gone")

    monkeypatch.setattr(shared_memory, "destroy_shared_memory_region", fails_after)
    with pytest.raises(OSError, match="it is gone"):
        su.unregister_cleanup_shm_regions(regions, handles, None, ["OUTPUT0"], True, False)
    assert is_gone("input0", "input1", "output0")
    with pytest.raises(InferenceServerException, match="input0_data"):
        upstream.client.infer("add_sub", inputs)
