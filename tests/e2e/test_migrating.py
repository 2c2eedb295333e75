"""The three programs in docs/migrating.md do the same."""

from __future__ import annotations

import os
import re
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc

from shm_backend_utils.client.paths.triton_shm import unregister_when_free
from shm_backend_utils.server import EmbeddedServer
from tests.conftest import ROOT

DOCUMENT = (ROOT / "docs" / "migrating.md").read_text()
COLUMNS = ("by hand", "attach", "ShmClient")
SUMS = np.arange(1, 17).reshape(1, 16)
DIFFERENCES = np.arange(-1, 15).reshape(1, 16)


def codes(row: str) -> list[str]:
    """Return the code of each column in a row of the table."""
    found: list[str] = []
    for cell in re.findall(r"<td>(.*?)</td>", row, re.DOTALL)[1:]:
        code = re.search(r"```python\n(.*?)```", cell, re.DOTALL)
        found.append(found[-1] if cell == "the same" else code[1] if code else "")
    return found


def program(column: str, server: EmbeddedServer) -> str:
    rows = [row for row in re.findall(r"<tr>(.*?)</tr>", DOCUMENT, re.DOTALL) if "```python" in row]
    whole = "".join(codes(row)[COLUMNS.index(column)] for row in rows)
    return whole.replace("localhost:8001", server.grpc_url).replace("/add_sub_", f"/add_sub_{os.getpid()}_")


def test_the_other_clients_class_has_its_name_here() -> None:
    line = re.findall(r"^```python\n(.*?)```", DOCUMENT, re.DOTALL | re.MULTILINE)[0]
    names: dict[str, Any] = {}
    exec(line, names)
    assert names["TritonSHMClient"].__module__.startswith("shm_backend_utils.compat.triton_shm_client")


@pytest.fixture
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tritonclient wait for a server that has answered, but is still in the region."""
    unregister = tritonclient.grpc.InferenceServerClient.unregister_system_shared_memory

    def unregister_patiently(client: Any, name: str) -> None:
        unregister_when_free(lambda: unregister(client, name))

    monkeypatch.setattr(
        tritonclient.grpc.InferenceServerClient, "unregister_system_shared_memory", unregister_patiently
    )


@pytest.mark.usefixtures("_patient")
def test_they_give_the_sums_and_the_differences_and_attach_is_an_import_and_one_call(
    triton_server: EmbeddedServer,
) -> None:
    for column in COLUMNS:
        names: dict[str, Any] = {}
        exec(program(column, triton_server), names)
        assert np.array_equal(names["sums"], SUMS)
        assert np.array_equal(names["differences"], DIFFERENCES)
    by_hand, attached = (program(column, triton_server) for column in ("by hand", "attach"))
    without_import = attached.replace("from shm_backend_utils.compat.attach import attach\n", "", 1)
    call = 'client.infer(\n    "add_sub",\n    **attach("add_sub", inputs, outputs, batch_size=1),\n)\n'
    assert without_import.replace(call, 'client.infer("add_sub", inputs, outputs=outputs)\n', 1) == by_hand


def test_the_example_of_shm_util(triton_server: EmbeddedServer) -> None:
    section = DOCUMENT.partition("## From the shm_util of")[2]
    example = re.findall(r"```python\n(.*?)```", section, re.DOTALL)[0]
    a, b = np.arange(16, dtype=np.int32).reshape(1, 16), np.ones((1, 16), np.int32)
    with tritonclient.grpc.InferenceServerClient(triton_server.grpc_url) as client:
        names: dict[str, Any] = {"np": np, "a": a, "b": b, "client": client}
        before = set(client.get_system_shared_memory_status().regions)
        exec(example, names)
        assert set(client.get_system_shared_memory_status().regions) == before
    assert np.array_equal(names["sums"], SUMS)
