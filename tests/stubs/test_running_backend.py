"""What there is in the running stub process, the stubs have; signatures are compared by way of the emulator."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from shm_backend_utils.client import ShmClient
from shm_backend_utils.server import EmbeddedServer

from .sources import MODULES, declared

# What every class has, and what pybind11 keeps.
UNTYPED = {
    *("__module__", "__doc__", "__dict__", "__weakref__", "__repr__", "__str__", "__getstate__", "__setstate__"),
    *("__entries", "__init__"),
}


@pytest.fixture(scope="module")
def report(triton_server: EmbeddedServer) -> dict[str, Any]:
    """What a model finds in both modules when it is imported, and afterwards."""
    with ShmClient(triton_server.grpc_url, timeout_s=60) as client:
        found: dict[str, Any] = json.loads(
            bytes(client.infer("backend_names", {}, outputs={"REPORT": 1 << 20})["REPORT"])
        )
    return found


def flat(names: Mapping[str, Any], owner: str = "") -> Iterator[str]:
    for name, facts in names.items():
        if name not in UNTYPED and (owner or not name.startswith("__")):
            yield owner + name
            yield from flat(facts.get("names", {}), f"{owner}{name}.")


@pytest.mark.parametrize("module", MODULES)
def test_every_name_of_the_running_server_is_declared(module: str, report: dict[str, Any]) -> None:
    found = set(flat(report["now"][module]))
    assert len(found) > 10
    assert found - declared(module) == set()


def test_what_is_compiled_comes_after_model_py_was_imported(report: dict[str, Any]) -> None:
    early = report["at import"]
    assert not {"Tensor", "InferenceRequest", "InferenceResponse"} & set(early["triton_python_backend_utils"])
    assert "InferenceResponseSender" in early["c_python_backend_utils"]
