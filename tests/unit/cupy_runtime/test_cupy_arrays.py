"""Arrays over device memory, arrays that are adopted, and capsules."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.memory.cuda.cupy_runtime import CupyRuntime
from tests.unit.cupy_runtime.fake_cupy import F32, FakeCudaCalls, FakeCupy, on_device


def test_an_array_lies_over_the_memory_and_keeps_its_owner(
    cupy: FakeCupy, runtime: CupyRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cupy, "ndarray", lambda *arguments: arguments)
    cupy.cuda.UnownedMemory = lambda *arguments: arguments
    cupy.cuda.MemoryPointer = lambda memory, offset: (memory, offset)
    owner = object()
    assert runtime.array(4096, (2, 3), F32, 1, owner) == ((2, 3), F32, ((4096, 24, owner, 1), 0))


def test_an_array_knows_where_it_begins_and_whether_it_is_contiguous(runtime: CupyRuntime) -> None:
    array = on_device(4, 6)
    assert runtime.address_of(array[1:]) == array.data.ptr + 24
    assert runtime.is_contiguous(array[1:])
    assert not runtime.is_contiguous(array[:, 1:])


def test_an_array_of_cupy_is_adopted_as_it_is(runtime: CupyRuntime) -> None:
    array = on_device(3)
    assert runtime.adopt(array) is array


@pytest.mark.parametrize(
    "value",
    [
        SimpleNamespace(__dlpack__=None),
        SimpleNamespace(__dlpack__=None, __cuda_array_interface__={}),
        np.zeros(3).__dlpack__(),
    ],
    ids=["a producer", "a producer with both protocols", "a capsule"],
)
def test_dlpack_is_adopted_by_dlpack(value: Any, runtime: CupyRuntime) -> None:
    assert runtime.adopt(value) == ("from_dlpack", value)


@pytest.mark.parametrize(("address", "device"), [(4096, 1), (0, 0)], ids=["memory of GPU 1", "no memory"])
def test_what_has_only_cudas_interface_is_adopted_on_its_own_device(
    address: int, device: int, calls: FakeCudaCalls, runtime: CupyRuntime
) -> None:
    calls.devices_by_address = {4096: 1}
    value = SimpleNamespace(__cuda_array_interface__={"data": (address, False)})
    assert runtime.adopt(value) == ("asarray", device)
    assert runtime.current_device() == 0


@pytest.mark.parametrize(
    ("max_version", "given"),
    [(None, {"stream": 7}), ((1, 0), {"stream": 7, "max_version": (1, 0)})],
    ids=["a consumer of old", "a consumer that knows versions"],
)
def test_cupy_makes_the_capsules(max_version: Any, given: dict[str, Any], runtime: CupyRuntime) -> None:
    assert runtime.capsule(array_on(0, lambda **arguments: arguments), 7, max_version) == given


def test_a_capsule_is_made_on_the_device_of_its_array(runtime: CupyRuntime) -> None:
    runtime.set_device(0)
    assert runtime.capsule(array_on(1, lambda **_: runtime.current_device()), 7, None) == 1
    assert runtime.current_device() == 0


def array_on(device: int, export: Any) -> Any:
    return SimpleNamespace(data=SimpleNamespace(device_id=device), __dlpack__=export)


def test_a_cupy_that_knows_no_versions_makes_capsules_without(runtime: CupyRuntime) -> None:
    array = array_on(0, lambda stream: ("capsule", stream))
    assert runtime.capsule(array, 7, (1, 0)) == ("capsule", 7)
