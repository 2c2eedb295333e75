"""A region and requests that are made by hand, so that any part of them may be a lie, and what every attack is."""

from __future__ import annotations

import os
import queue
import random
import secrets
from abc import ABC, abstractmethod
from collections import Counter
from typing import Any, Final

import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from shm_backend_utils.dtypes import BY_NAME
from shm_backend_utils.memory import locks
from shm_backend_utils.memory.managed import KEY_PREFIX
from shm_backend_utils.memory.shared_file import DEV_SHM
from shm_backend_utils.protocol import layout, table
from shm_backend_utils.protocol.address import GENERATION_PARAMETER, SLOT_PARAMETER, SlotAddress
from shm_backend_utils.protocol.layout import PAGE_SIZE, Header
from shm_backend_utils.protocol.refusals import code_in
from shm_backend_utils.protocol.spans import InputSpan, OutputSpan, Table

MODEL: Final = "halves"
DATA: Final = layout.data_offset(1, PAGE_SIZE)
TIMEOUT_S: Final = 30.0
_RECORD: Final = layout.record_offset(0, PAGE_SIZE)
_WORD: Final = 8


class Forged:
    """A file like a managed region, of which this process holds the owner's lease. No mapping: 10,000 of them fit."""

    def __init__(self, byte_size: int = DATA + PAGE_SIZE, *, is_sparse: bool = False) -> None:
        self.key = f"{KEY_PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
        self.byte_size = byte_size
        self._generation = 0
        self._token = secrets.token_bytes(layout.TOKEN_LENGTH)
        self.fd = os.open(DEV_SHM / self.key, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        locks.hold_owner_lease(self.fd)
        os.ftruncate(self.fd, byte_size)
        if not is_sparse:
            os.posix_fallocate(self.fd, 0, byte_size)
        self.write_header()

    def write_header(self) -> None:
        """Write what a truncation has taken away, too."""
        header = bytearray(layout.HEADER_LENGTH)
        layout.write_header(memoryview(header), Header(1, self.byte_size, self._token, PAGE_SIZE))
        os.pwrite(self.fd, header, 0)

    def begin(self, record: bytes) -> dict[str, Any]:
        """Write the client's half of the record behind the generation, then that; return the request's parameters."""
        self._generation += 1
        os.pwrite(self.fd, record, _RECORD + _WORD)
        os.pwrite(self.fd, self._generation.to_bytes(_WORD, "little"), _RECORD)
        address = SlotAddress(MODEL, self.key, self._token.hex(), 0)
        return {SLOT_PARAMETER: str(address), GENERATION_PARAMETER: self._generation}

    def remove(self) -> None:
        """Remove the file."""
        (DEV_SHM / self.key).unlink(missing_ok=True)
        os.close(self.fd)


def valid_table(x: int, y: int, byte_size: int) -> bytes:
    """Return the table of a request whose tensors are of a size, at these offsets."""
    span = InputSpan(BY_NAME["UINT32"], (byte_size // 4,), 0, x, byte_size)
    return table.encode(Table({"X": span}, {"Y": OutputSpan(0, y, byte_size)}))


class Wire:
    """Sends requests by plain tritonclient, and counts the answers."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.client = tritonclient.grpc.InferenceServerClient(url)
        self.answers: Counter[str] = Counter()

    def send(self, parameters: dict[str, Any], model: str = MODEL, timeout_s: float = TIMEOUT_S) -> None:
        """Send a request, and wait for its answer."""
        try:
            self.client.infer(model, [], parameters=parameters, client_timeout=timeout_s)
        except InferenceServerException as error:
            self.count(error)
        else:
            self.count(None)

    def begin(self, parameters: dict[str, Any], answers: queue.Queue[Any]) -> None:
        """Send a request; the queue gets its error, or None, when it is answered."""
        self.client.async_infer(
            MODEL, [], lambda result, error: answers.put(error), parameters=parameters, client_timeout=TIMEOUT_S
        )

    def count(self, error: InferenceServerException | None) -> None:
        """Count an answer."""
        if error is None:
            self.answers["answered"] += 1
        else:
            message = error.message() or ""
            self.answers[code_in(message) or f"{error.status()}: {message[:150]}"] += 1


class Attack(ABC):
    """One attacker. What it needs is made before anything is measured."""

    def __init__(self, wire: Wire, seed: int) -> None:
        self.wire = wire
        self.chance = random.Random(seed)
        self.forged: list[Forged] = []
        self.prepare()

    @abstractmethod
    def prepare(self) -> None:
        """Make what is needed."""

    @abstractmethod
    def strike(self) -> None:
        """Do one unit of work."""

    def pause(self) -> None:
        """Let go of what is held, as another attacker's turn begins. Most hold nothing."""
        return

    def close(self) -> None:
        """Remove what was made."""
        while self.forged:
            self.forged.pop().remove()
