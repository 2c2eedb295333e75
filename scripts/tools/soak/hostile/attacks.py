"""The one table of what hostile clients do, and how fast. Each attack has a process of its own.

They are attacks on the library, and not on the machine: behind each unit of work the attacker pauses, and one attacker
is at work at a time.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import resource
import secrets
import socket
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from shm_backend_utils.client import ShmClient
from shm_backend_utils.errors import ShmError
from shm_backend_utils.memory.locks import SlotLease
from shm_backend_utils.memory.shared_file import DEV_SHM, free_bytes
from shm_backend_utils.protocol import layout
from shm_backend_utils.protocol.address import GENERATION_PARAMETER, SLOT_PARAMETER, SlotAddress
from shm_backend_utils.protocol.handover import SealedKey
from shm_backend_utils.protocol.layout import PAGE_SIZE, TOKEN_LENGTH

from ..server import DISALLOWED_UID
from .forged import DATA, MODEL, Attack, Forged, valid_table

__all__ = ["ATTACKS", "HONEST", "Kind"]

_LINGER: Final = struct.pack("ii", 1, 3600)
_MOST_LINGERING: Final = 400
_CROWD: Final = 200
_CREDENTIALS: Final = struct.Struct("iII")  # process, user, group
HONEST: Final = f"{__package__}.honest"
"""The program whose processes are attacked."""

_KIND: Final = socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK
_SOCKETS: Final = re.compile(r" @(shmbu-fd-[0-9a-f]{32})$", re.MULTILINE)

FLOOD: Final = 10_000
FLOOD_AT_ONCE: Final = 8
HUGE: Final = 100 << 20


class _Lingering(Attack):
    """Has sockets that take long to close, each of which can be given away once."""

    def prepare(self) -> None:
        self._listener = socket.socket()
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen()
        self._kept: list[socket.socket] = []
        self._ready: list[socket.socket] = []

    def give(self, connection: socket.socket) -> None:
        """Send one to a peer, if he takes it; count whether he did."""
        lingering = self._ready.pop() if self._ready else self._make()
        try:
            socket.send_fds(connection, [b"y"], [lingering.fileno()])
        except OSError as error:
            self._ready.append(lingering)
            self.wire.answers[f"not taken: {error.strerror}"] += 1
            return
        self.wire.answers["taken"] += 1
        threading.Thread(target=lingering.close, daemon=True).start()  # which waits as long as the peer's would

    def _make(self) -> socket.socket:
        sender = socket.socket()
        sender.connect(self._listener.getsockname())
        receiver, _ = self._listener.accept()
        self._kept.append(receiver)  # reads nothing
        sender.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER)
        sender.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                sender.send(bytes(1 << 16))
        return sender

    def close(self) -> None:
        super().close()
        while self._kept:
            self._kept.pop().close()  # resets the others


class LingeringServer(_Lingering):
    """A handover server of his own, to which his requests send the model: it hands over at once to who connects."""

    def prepare(self) -> None:
        super().prepare()
        self._key = SealedKey(secrets.token_hex(16), 1)
        self._socket = socket.socket(socket.AF_UNIX, _KIND)
        self._socket.bind(self._key.socket_address)
        self._socket.listen(4096)

    def strike(self) -> None:
        """Serve whoever has connected, and send the model here."""
        address = SlotAddress(MODEL, str(self._key), secrets.token_hex(TOKEN_LENGTH), 0)
        parameters: dict[str, Any] = {SLOT_PARAMETER: str(address), GENERATION_PARAMETER: 1}
        asking = threading.Thread(target=self.wire.send, args=(parameters,))
        asking.start()
        while asking.is_alive():
            with contextlib.suppress(BlockingIOError), self._socket.accept()[0] as model:
                if len(self._kept) < _MOST_LINGERING:
                    self.give(model)
            asking.join(0.0005)

    def close(self) -> None:
        super().close()
        self._socket.close()


class LingeringGuests(_Lingering):
    """Goes to the handover socket of every client, and leaves something there that takes long to close."""

    def strike(self) -> None:
        """Visit each socket once."""
        for address in _sockets():
            with socket.socket(socket.AF_UNIX, _KIND) as guest, contextlib.suppress(OSError):
                guest.connect(address)
                if len(self._kept) < _MOST_LINGERING and _is_of_honest_client(guest):
                    self.give(guest)


class CrowdedSockets(Attack):
    """Fills the queue of one client's handover socket, over and over; others of the same user have theirs beside it."""

    def prepare(self) -> None:
        self._crowd: list[socket.socket] = []

    def strike(self) -> None:
        """Leave with the last crowd, and come with the next one."""
        self.pause()
        addresses = _sockets()
        if not addresses:
            return
        address = self.chance.choice(addresses)
        with contextlib.suppress(OSError):  # the queue is full, or the socket has gone
            for _ in range(_CROWD):
                self._crowd.append(socket.socket(socket.AF_UNIX, _KIND))
                self._crowd[-1].connect(address)
                if not _is_of_honest_client(self._crowd[0]):
                    break
        self.wire.answers["connected"] += len(self._crowd)

    def pause(self) -> None:
        while self._crowd:
            self._crowd.pop().close()


def _is_of_honest_client(guest: socket.socket) -> bool:
    """Return whether a socket belongs to a client of a soak: others on this machine are not to be disturbed."""
    pid, *_ = _CREDENTIALS.unpack(guest.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return HONEST.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()


def _sockets() -> list[str]:
    """Return the addresses of all handover sockets, which every user may read."""
    return [f"\0{name}" for name in dict.fromkeys(_SOCKETS.findall(Path("/proc/net/unix").read_text()))]


class Sparse(Attack):
    """A region that is larger than what is free, of which nothing is there: touching it is a SIGBUS."""

    def prepare(self) -> None:
        self._half = (2 * int(free_bytes())) & -PAGE_SIZE
        self.forged.append(Forged(DATA + 2 * self._half, is_sparse=True))

    def strike(self) -> None:
        (forged,) = self.forged
        self.wire.send(forged.begin(valid_table(DATA, DATA + self._half, self._half)))

    def pause(self) -> None:
        """Give back what the model has touched, so that others find room again."""
        (forged,) = self.forged
        os.ftruncate(forged.fd, 0)
        os.ftruncate(forged.fd, forged.byte_size)
        forged.write_header()


class Truncating(Attack):
    """A region that loses and gets back its size as fast as that goes, while a request in it is under way."""

    def prepare(self) -> None:
        self.forged.append(Forged(DATA + 4 * PAGE_SIZE))

    def strike(self) -> None:
        (forged,) = self.forged
        parameters = forged.begin(valid_table(DATA, DATA + PAGE_SIZE, PAGE_SIZE))
        answers: queue.Queue[Any] = queue.Queue()
        self.wire.begin(parameters, answers)
        while answers.empty():
            os.ftruncate(forged.fd, 0)
            os.ftruncate(forged.fd, forged.byte_size)
            forged.write_header()
        self.wire.count(answers.get())


class Locking(Attack):
    """A client that holds the lock of the slot that its own request names."""

    def prepare(self) -> None:
        self.forged.append(Forged())
        own = os.open(DEV_SHM / self.forged[0].key, os.O_RDWR | os.O_CLOEXEC)
        SlotLease(own, layout.record_offset(0, PAGE_SIZE)).take()

    def strike(self) -> None:
        (forged,) = self.forged
        self.wire.send(forged.begin(valid_table(DATA, DATA, 0)))


class Flooding(Attack):
    """10,000 regions, each named by a request of its own, several at once, over and over."""

    def prepare(self) -> None:
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        self.forged += [Forged() for _ in range(min(FLOOD, most - 256))]
        self._next = 0

    def strike(self) -> None:
        answers: queue.Queue[Any] = queue.Queue()
        for _ in range(FLOOD_AT_ONCE):
            forged = self.forged[self._next]
            self._next = (self._next + 1) % len(self.forged)
            parameters = forged.begin(valid_table(DATA, DATA + 64, 64))
            self.wire.begin(parameters, answers)
        for _ in range(FLOOD_AT_ONCE):
            self.wire.count(answers.get())


class SlowReader(Attack):
    """A stream of which each response is held for a while."""

    def prepare(self) -> None:
        self._client = ShmClient(self.wire.url, timeout_s=60, path="direct")
        self._frames: Any = None
        self._held: Any = None

    def strike(self) -> None:
        try:
            if self._frames is None:
                image = np.zeros((2560, 2560, 3), np.uint8)  # 100 tiles
                room = {"TILE": 256 * 256 * 3, "PLACE": 8}
                self._frames = self._client.stream("frames", {"IMAGE": image}, outputs=room, frames=1)
            self._held = None
            self._held = next(self._frames, None)
            self.wire.answers["a response of a stream"] += 1
        except ShmError as error:
            self.wire.answers[f"{type(error).__name__}: {str(error)[:100]}"] += 1
            self._frames = None
        if self._held is None:
            self._frames = None

    def pause(self) -> None:
        self._held = None
        frames, self._frames = self._frames, None
        if frames is not None:
            frames.close()

    def close(self) -> None:
        self.pause()
        self._client.close()


class Garbage(Attack):
    """Records of random bytes; tables that are right but for some bytes; addresses and generations that are wrong."""

    def prepare(self) -> None:
        self.forged.append(Forged(DATA + 4 * PAGE_SIZE))
        self._right = valid_table(DATA, DATA + PAGE_SIZE, 64)

    def strike(self) -> None:
        (forged,) = self.forged
        self.wire.send(next(self._requests(forged)))

    def _requests(self, forged: Forged) -> Iterator[dict[str, Any]]:
        chance = self.chance
        way = chance.randrange(4)
        if way == 0:
            yield forged.begin(chance.randbytes(PAGE_SIZE // 2 - 8))
        broken = bytearray(self._right)
        for _ in range(chance.randint(1, 8)):
            broken[chance.randrange(len(broken))] = chance.getrandbits(8)
        parameters = forged.begin(bytes(broken))
        if way == 1:
            name = chance.choice(list(parameters))
            yield {**parameters, name: chance.choice((True, -1, 1 << 62, "", "2/halves", "x" * 5000, parameters[name]))}
        if way == 2:
            text = list(parameters["shm_slot"])
            text[chance.randrange(len(text))] = chr(chance.randint(32, 126))
            yield {**parameters, "shm_slot": "".join(text)}
        yield parameters


class HugeParameters(Attack):
    """A parameter of 100 MB."""

    def prepare(self) -> None:
        self.forged.append(Forged())
        self._text = "x" * HUGE

    def strike(self) -> None:
        (forged,) = self.forged
        self.wire.send({**forged.begin(valid_table(DATA, DATA + 64, 64)), "much": self._text})


@dataclass(frozen=True)
class Kind:
    """A row of the table."""

    name: str
    attack: type[Attack]
    pause_s: float  # behind each unit of work
    uid: int | None = None  # whose client it is; None for a user who is allowed
    kills: bool = False  # whether the model instance may die of it: nobody can prevent that


ATTACKS: Final = (
    Kind("sparse files", Sparse, 0.1),
    Kind("truncating, a user who is not allowed", Truncating, 0.005, uid=DISALLOWED_UID),
    Kind("truncating, a user who is allowed", Truncating, 0.005, kills=True),
    Kind("locking its own slots", Locking, 0.05),
    Kind("flooding with 10,000 regions", Flooding, 0.01),
    Kind("slow reader of a stream", SlowReader, 0.5),
    Kind("garbage tables", Garbage, 0.005),
    Kind("parameters of 100 MB", HugeParameters, 1.0),
    Kind("lingering sockets for the model that fetches", LingeringServer, 0.01, uid=DISALLOWED_UID),
    Kind("lingering sockets at clients' handover sockets", LingeringGuests, 0.01, uid=DISALLOWED_UID),
    Kind("crowds at clients' handover sockets", CrowdedSockets, 0.01, uid=DISALLOWED_UID),
)
