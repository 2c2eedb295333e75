"""``shm_util`` as Triton's own tests call it: by the arguments, the names and the order of ``infer_util``."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException, shared_memory

from shm_backend_utils.client.unregistering import unregister_when_free
from shm_backend_utils.compat import shm_util as su
from shm_backend_utils.server import EmbeddedServer

from .shm_util_wire import MODULES

A: Final = np.arange(16, dtype=np.int32).reshape(1, 16)
B: Final = np.ones((1, 16), np.int32)
EXPECTED: Final = {"OUTPUT0": A + B, "OUTPUT1": A - B}
SHM: Final = Path("/dev/shm")


@pytest.fixture
def client(protocol: str, triton_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("TRITONSERVER_IPADDR", triton_server.http_url)
    client = MODULES[protocol].InferenceServerClient(getattr(triton_server, f"{protocol}_url"))
    yield client
    client.close()


def inputs_of(protocol: str, *names: str) -> list[Any]:
    return [MODULES[protocol].InferInput(name, [1, 16], "INT32") for name in names]


def infer(client: Any, protocol: str, names: Any, outputs: Collection[str], precreated: Any = None) -> dict[str, Any]:
    """Do what ``infer_util.infer_exact`` does around its inference, with its calls; return the outputs."""
    regions, handles = su.create_set_shm_regions([A], [B], A.nbytes, A.nbytes, outputs, names, precreated, True, False)
    try:
        inputs = inputs_of(protocol, "INPUT0", "INPUT1")
        size = A.nbytes
        su.register_add_shm_regions(
            inputs, outputs, regions, precreated, handles, size, size, size, size, True, False, client
        )
        asked = []
        for place, name in enumerate(sorted(outputs)):
            asked.append(MODULES[protocol].InferRequestedOutput(name))
            asked[-1].set_shared_memory(f"{regions[2 + place]}_data", A.nbytes)
        client.infer("add_sub", inputs, outputs=asked)
        found = {"OUTPUT0": handles[2], "OUTPUT1": handles[3]}
        assert [name for name, handle in found.items() if handle is not None] == sorted(outputs)
        return {
            name: shared_memory.get_contents_as_numpy(handle, np.int32, [1, 16]).tolist()
            for name, handle in found.items()
            if handle is not None
        }
    finally:
        su.unregister_cleanup_shm_regions(regions, handles, precreated, outputs, True, False)


def is_clean(client: Any, *names: str) -> bool:
    known = str(client.get_system_shared_memory_status())
    return not any(f"{name}_data" in known or (SHM / name).exists() for name in names)


@pytest.mark.parametrize("outputs", [["OUTPUT0", "OUTPUT1"], ["OUTPUT0"], ["OUTPUT1"]], ids=["both", "first", "second"])
@pytest.mark.parametrize(
    "names", [None, ["upstream_a", "upstream_b", "upstream_c", "upstream_d"]], ids=["default", "own"]
)
def test_two_inputs_and_the_outputs_that_are_wanted(
    client: Any, protocol: str, names: list[str] | None, outputs: list[str]
) -> None:
    assert infer(client, protocol, names, outputs) == {name: EXPECTED[name].tolist() for name in outputs}
    assert is_clean(client, *(names or ["input0", "input1", "output0", "output1"]))


def test_regions_that_were_made_before_stay_the_callers(client: Any, protocol: str) -> None:
    names = [f"precreated{number}" for number in range(4)]
    before = [shared_memory.create_shared_memory_region(f"{name}_data", f"/{name}", A.nbytes) for name in names[2:]]
    for name in names[2:]:
        client.register_system_shared_memory(f"{name}_data", f"/{name}", A.nbytes)
    found = infer(client, protocol, names, ["OUTPUT0", "OUTPUT1"], before)
    assert found == {name: value.tolist() for name, value in EXPECTED.items()}
    for name, handle in zip(names[2:], before, strict=True):
        unregister_when_free(partial(client.unregister_system_shared_memory, f"{name}_data"))
        shared_memory.destroy_shared_memory_region(handle)
    assert is_clean(client, *names)


def test_one_input_and_one_output(client: Any, protocol: str) -> None:
    """As ``infer_util.infer_zero`` does, for a model whose tensors are many alike."""
    prefixes, handles = (
        ["either_in", "either_out"],
        su.create_set_either_shm_region(["either_in0", "either_out0"], [A], A.nbytes, A.nbytes, True, False),
    )
    inputs = inputs_of(protocol, "INPUT0", "INPUT1")
    outputs = [MODULES[protocol].InferRequestedOutput("OUTPUT0")]
    of_all = ([handles[0]], [handles[1]])
    su.register_add_either_shm_regions(inputs, outputs, prefixes, of_all, 0, A.nbytes, A.nbytes, True, False, client)
    inputs[1].set_data_from_numpy(B)
    client.infer("add_sub", inputs, outputs=outputs)
    assert shared_memory.get_contents_as_numpy(handles[1], np.int32, [1, 16]).tolist() == (A + B).tolist()
    for name, handle in zip(("either_in0", "either_out0"), handles, strict=True):
        unregister_when_free(partial(client.unregister_system_shared_memory, f"{name}_data"))
        shared_memory.destroy_shared_memory_region(handle)
    assert is_clean(client, "either_in0", "either_out0")


def test_what_fails_at_cleaning_up_does_not_keep_the_rest_from_being_done(
    client: Any, protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    regions, handles = su.create_set_shm_regions([A], [B], 64, 64, ["OUTPUT0"], None, None, True, False)
    inputs = inputs_of(protocol, "INPUT0", "INPUT1")
    su.register_add_shm_regions(inputs, ["OUTPUT0"], regions, None, handles, 64, 64, 64, 64, True, False, client)
    destroy = shared_memory.destroy_shared_memory_region

    def fails_after(handle: Any) -> None:
        destroy(handle)
        if handle is handles[1]:
            raise OSError("it is gone")

    monkeypatch.setattr(shared_memory, "destroy_shared_memory_region", fails_after)
    with pytest.raises(OSError, match="it is gone"):
        su.unregister_cleanup_shm_regions(regions, handles, None, ["OUTPUT0"], True, False)
    assert is_clean(client, "input0", "input1", "output0")
    with pytest.raises(InferenceServerException, match="input0_data"):
        client.infer("add_sub", inputs)
