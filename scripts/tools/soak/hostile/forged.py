"""A region and requests that are made by hand, so that any part of them may be a lie, and an attacker's means."""

from __future__ import annotations

import os
import queue
import random
import secrets
import time
from collections import Counter
from contextlib import ExitStack
from typing import Any, Final

import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from shm_backend_utils.dtypes import BY_NAME
from shm_backend_utils.errors import code_in
from shm_backend_utils.memory import locks
from shm_backend_utils.memory.managed import KEY_PREFIX
from shm_backend_utils.memory.shared_file import DEV_SHM
from shm_backend_utils.protocol import layout, table
from shm_backend_utils.protocol.layout import PAGE_SIZE, Header
from shm_backend_utils.protocol.parameters import GENERATION_PARAMETER, SLOT_PARAMETER, SlotAddress
from shm_backend_utils.protocol.spans import InputSpan, OutputSpan, Table

MODEL: Final = "halves"
DATA: Final = layout.data_offset(1, PAGE_SIZE)
_RECORD: Final = layout.record_offset(0, PAGE_SIZE)
_WORD: Final = 8


class Forged:
    """A file like a managed region, of which this process holds the owner's lease. No mapping: 10,000 of them fit."""

    def __init__(self, byte_size: int, *, is_sparse: bool) -> None:
        key = f"{KEY_PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
        self.path = DEV_SHM / key
        self._byte_size = byte_size
        self._generation = 0
        token = secrets.token_bytes(layout.TOKEN_LENGTH)
        self._address = str(SlotAddress(MODEL, key, token.hex(), 0))
        self._fd = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        locks.hold_owner_lease(self._fd)
        os.ftruncate(self._fd, byte_size)
        if not is_sparse:
            self.allocate()
        self._header = bytearray(layout.HEADER_LENGTH)
        layout.write_header(memoryview(self._header), Header(1, byte_size, token, PAGE_SIZE))
        os.pwrite(self._fd, self._header, 0)

    def is_in_use(self) -> bool:
        return locks.is_slot_in_use(self._fd, _RECORD)

    def allocate(self) -> None:
        os.posix_fallocate(self._fd, 0, self._byte_size)

    def lose_memory(self, seconds: float = 0.0) -> None:
        """Lose all memory, and get the size and the header back."""
        os.ftruncate(self._fd, 0)
        time.sleep(seconds)
        os.ftruncate(self._fd, self._byte_size)
        os.pwrite(self._fd, self._header, 0)

    def begin(self, record: bytes) -> dict[str, Any]:
        """Write the client's half of the record behind the generation, then that; return the request's parameters."""
        self._generation += 1
        os.pwrite(self._fd, record, _RECORD + _WORD)
        os.pwrite(self._fd, self._generation.to_bytes(_WORD, "little"), _RECORD)
        return {SLOT_PARAMETER: self._address, GENERATION_PARAMETER: self._generation}

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
        os.close(self._fd)


def valid_table(y: int, byte_size: int) -> bytes:
    """Return the table of a request whose input is where the data begins, and whose output is at an offset."""
    span = InputSpan(BY_NAME["UINT32"], (byte_size // 4,), 0, DATA, byte_size)
    return table.encode(Table({"X": span}, {"Y": OutputSpan(0, y, byte_size)}))


class Attacker:
    """What an attack has: plain tritonclient, whose answers it counts, dice, and regions of its own."""

    def __init__(self, url: str, seed: int) -> None:
        self.url = url
        self.chance = random.Random(seed)
        self.answers: Counter[str] = Counter()
        self.turn = ExitStack()  # closed as another attacker's turn begins
        self.at_end = ExitStack()
        self._client = tritonclient.grpc.InferenceServerClient(url)
        self._client.is_server_live()  # all that is imported late is read now

    def forge(self, byte_size: int = DATA + 4 * PAGE_SIZE, *, is_sparse: bool = False) -> Forged:
        """Make a region, which is removed in the end."""
        forged = Forged(byte_size, is_sparse=is_sparse)
        self.at_end.callback(forged.remove)
        return forged

    def send(self, parameters: dict[str, Any]) -> None:
        self.count(self.begin(parameters).get())

    def begin(self, parameters: dict[str, Any], answers: queue.Queue[Any] | None = None) -> queue.Queue[Any]:
        """Send a request; the queue gets its error, or None, when it is answered."""
        into = answers or queue.Queue()
        self._client.async_infer(
            MODEL, [], lambda result, error: into.put(error), parameters=parameters, client_timeout=30.0
        )
        return into

    def count(self, error: InferenceServerException | None) -> None:
        message = "answered" if error is None else error.message() or ""
        self.answers[code_in(message) or message[:150]] += 1
