"""``shm_util`` by the arguments of the original in Triton's tests, as far as no server is needed."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import tritonclient.http
import tritonclient.utils
from tritonclient.utils import InferenceServerException, serialize_byte_tensor, shared_memory

from shm_backend_utils.compat import shm_util as su

X: Final = np.arange(4, dtype=np.float32)
SHM: Final = Path("/dev/shm")


class Asked:
    """A client, or a tensor, that notes what it is asked for."""

    def __init__(self, *_: Any) -> None:
        self.told: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self.told.append((name, *arguments))


def test_without_shared_memory_there_is_nothing_to_do() -> None:
    nothing = Asked()
    assert su.create_set_shm_regions([X], [X], 16, 16, ["OUTPUT0"], None, None, False, False) == ([], [])
    assert su.create_set_either_shm_region(["a", "b"], [X], 16, 16, False, False) == []
    su.register_add_shm_regions([], [], [], None, [], 16, 16, 16, 16, False, False, nothing)
    su.register_add_either_shm_regions([], [], ["a", "b"], ([], []), 0, 16, 16, False, False, nothing)
    su.unregister_cleanup_shm_regions([], [], None, [], False, False)
    assert nothing.told == []


def test_both_kinds_at_once_are_refused() -> None:
    with pytest.raises(ValueError, match="are both set; expected one of them"):
        su.create_set_shm_regions([X], [X], 16, 16, ["OUTPUT0"], None, None, True, True)
    with pytest.raises(ValueError, match="are both set; expected one of them"):
        su.create_set_either_shm_region(["a", "b"], [X], 16, 16, True, True)


def test_the_arguments_may_have_their_names() -> None:
    names, handles = su.create_set_shm_regions(
        input0_list=[X],
        input1_list=[X, X],
        output0_byte_size=16,
        output1_byte_size=16,
        outputs=["OUTPUT1"],
        shm_region_names=["upstream0", "upstream1", "upstream3"],
        precreated_shm_regions=None,
        use_system_shared_memory=True,
        use_cuda_shared_memory=False,
    )
    assert [(SHM / name).stat().st_size for name in names] == [16, 32, 16]
    assert handles[2] is None
    for handle in filter(None, handles):
        shared_memory.destroy_shared_memory_region(handle)


def test_strings_are_those_that_were_serialized() -> None:
    words = [serialize_byte_tensor(np.array([[b"a", b"bcd"]], object))]
    names, handles = su.create_set_shm_regions(words, words, 1, 1, [], ["words0", "words1"], None, True, False)
    assert (SHM / names[0]).read_bytes() == b"\1\0\0\0a\3\0\0\0bcd"
    for handle in handles[:2]:
        shared_memory.destroy_shared_memory_region(handle)


def test_what_cannot_be_made_leaves_nothing_behind() -> None:
    names = ["upstream0", "upstream1", "upstream2"]
    with pytest.raises(shared_memory.SharedMemoryException):
        su.create_set_shm_regions([X], [X], -1, 0, ["OUTPUT0"], names, None, True, False)
    assert [name for name in names if (SHM / name).exists()] == []


def test_memory_of_a_gpu_is_tritonclients_too(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[Any, ...]] = []
    module = types.ModuleType("tritonclient.utils.cuda_shared_memory")
    for name in ("set_shared_memory_region", "destroy_shared_memory_region"):
        setattr(module, name, lambda *given, name=name: done.append((name, *given)))
    vars(module).update(
        create_shared_memory_region=lambda name, byte_size, device: (name, byte_size, device),
        get_raw_handle=lambda handle: f"raw {handle[0]}",
    )
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(tritonclient.utils, "cuda_shared_memory", module, raising=False)
    client = Asked()
    monkeypatch.setattr(tritonclient.http, "InferenceServerClient", lambda url: client)
    inputs = [Asked(), Asked()]
    names, handles = su.create_set_shm_regions([X], [X], 8, 8, ["OUTPUT1"], ["a", "b", "d"], None, False, True)
    assert handles == [("a_data", 16, 0), ("b_data", 16, 0), None, ("d_data", 8, 0)]
    su.register_add_shm_regions(inputs, ["OUTPUT1"], names, None, handles, 16, 16, 8, 8, False, True, client)
    assert client.told[-2:] == [
        ("unregister_cuda_shared_memory", "d_data"),
        ("register_cuda_shared_memory", "d_data", "raw d_data", 0, 8),
    ]
    assert inputs[1].told == [("set_shared_memory", "b_data", 16)]
    su.unregister_cleanup_shm_regions(names, handles, None, ["OUTPUT1"], False, True)
    gone = [handle for name, handle, *_ in done if name == "destroy_shared_memory_region"]
    assert sorted(gone) == [("a_data", 16, 0), ("b_data", 16, 0), ("d_data", 8, 0)]
    assert client.told[-1] == ("close",)


def test_a_region_that_a_request_has_just_used_is_unregistered_when_the_server_has_let_go_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Server(Asked):
        def unregister_system_shared_memory(self, name: str) -> None:
            self.told.append(("unregister_system_shared_memory", name))
            if len(self.told) == 1:
                raise InferenceServerException(f"Cannot unregister region '{name}', it is currently in use.")

    server = Server()
    monkeypatch.setattr(tritonclient.http, "InferenceServerClient", lambda url: server)
    names, handles = su.create_set_shm_regions([X], [X], 8, 8, ["OUTPUT0"], ["e", "f", "g"], None, True, False)
    su.unregister_cleanup_shm_regions(names, handles, None, ["OUTPUT0"], True, False)
    assert [name for _, *given in server.told for name in given] == ["g_data", "g_data", "f_data", "e_data"]
