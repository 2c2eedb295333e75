"""A client is closed while its calls are under way."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from shm_backend_utils.errors import ClosedError

from .eventually import eventually
from .flavours import Flavour, LoopedClient

X = np.zeros(10, np.float32)


def test_a_call_that_waits_for_its_answer_is_told_so(flavour: Flavour, tmp_path: Path) -> None:
    note = tmp_path / "note"
    client = flavour.client()
    answer = client.submit("call_facts", {"X": X}, parameters={"note": str(note)})
    if isinstance(client, LoopedClient):
        client.run(asyncio.to_thread(eventually, note.exists))
        client.run(client.aio.close())
    else:
        eventually(note.exists)
        client.close()
    with pytest.raises(ClosedError, match="this client is closed; make a new one"):
        answer.result()
    client.close()
