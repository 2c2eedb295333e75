"""The one table of what hostile clients do, and how fast, and the program of each: one attack in a process of its own.

What an attack needs is made before anything is measured; it returns one unit of its work, behind which it pauses.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import resource
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from shm_backend_utils.client import ShmClient
from shm_backend_utils.errors import ShmError
from shm_backend_utils.memory.locks import SlotLease
from shm_backend_utils.memory.shared_file import free_bytes
from shm_backend_utils.protocol import layout
from shm_backend_utils.protocol.handover import SealedKey
from shm_backend_utils.protocol.layout import PAGE_SIZE, TOKEN_LENGTH
from shm_backend_utils.protocol.parameters import GENERATION_PARAMETER, SLOT_PARAMETER, SlotAddress

from ..client.process import CLIENT, become, hears
from .forged import DATA, MODEL, Attacker, valid_table

DISALLOWED_UID: Final = 20_002
_CREDENTIALS: Final = struct.Struct("iII")  # process, user, group

_KIND: Final = socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK

Strike = Callable[[], None]


def _lingering(attacker: Attacker) -> Callable[[socket.socket], None]:
    """Return a function that sends a peer a socket that takes long to close, if he takes it; 400 in all."""
    listener = attacker.at_end.enter_context(socket.socket())
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    ready: list[socket.socket] = []

    def make() -> socket.socket:
        sender = socket.socket()  # create_connection would import something that this user may not read
        sender.connect(listener.getsockname())
        attacker.at_end.enter_context(listener.accept()[0])  # it reads nothing
        sender.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 3600))
        sender.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                sender.send(bytes(1 << 16))
        return sender

    def give(peer: socket.socket) -> None:
        if attacker.answers["taken"] == 400:
            return
        lingering = ready.pop() if ready else make()
        try:
            socket.send_fds(peer, [b"y"], [lingering.fileno()])
        except OSError as error:
            ready.append(lingering)
            attacker.answers[f"not taken: {error.strerror}"] += 1
            return
        attacker.answers["taken"] += 1
        threading.Thread(target=lingering.close, daemon=True).start()  # which waits as long as the peer's would

    return give


def lingering_server(attacker: Attacker) -> Strike:
    """A handover server of his own, to which his requests send the model: it hands over at once to who connects."""
    give, key = _lingering(attacker), SealedKey(secrets.token_hex(16), 1)
    address = SlotAddress(MODEL, str(key), secrets.token_hex(TOKEN_LENGTH), 0)
    listener = attacker.at_end.enter_context(socket.socket(socket.AF_UNIX, _KIND))
    listener.bind(key.socket_address)
    listener.listen(4096)

    def strike() -> None:
        answers = attacker.begin({SLOT_PARAMETER: str(address), GENERATION_PARAMETER: 1})
        while True:
            with contextlib.suppress(BlockingIOError), listener.accept()[0] as model:
                give(model)
            with contextlib.suppress(queue.Empty):
                attacker.count(answers.get(timeout=0.0005))
                return

    return strike


def lingering_guests(attacker: Attacker) -> Strike:
    """Goes to the handover socket of every client, and leaves something there that takes long to close."""
    give = _lingering(attacker)

    def strike() -> None:
        for address in _sockets():
            with socket.socket(socket.AF_UNIX, _KIND) as guest, contextlib.suppress(OSError):
                guest.connect(address)
                if _is_of_honest_client(guest):
                    give(guest)

    return strike


def crowded_sockets(attacker: Attacker) -> Strike:
    """Fills the queue of one client's handover socket, over and over; others of the same user have theirs beside it."""

    def strike() -> None:
        attacker.turn.close()  # the last crowd leaves
        addresses = _sockets()
        for address in attacker.chance.sample(addresses, min(len(addresses), 1)):
            with contextlib.suppress(OSError):  # the queue is full, or the socket has gone
                for _ in range(200):
                    guest = attacker.turn.enter_context(socket.socket(socket.AF_UNIX, _KIND))
                    guest.connect(address)
                    if not _is_of_honest_client(guest):
                        break
                    attacker.answers["connected"] += 1

    return strike


def _is_of_honest_client(guest: socket.socket) -> bool:
    """Return whether a socket belongs to a client of a soak: others on this machine are not to be disturbed."""
    pid, *_ = _CREDENTIALS.unpack(guest.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return f"\0{CLIENT}\0".encode() in Path(f"/proc/{pid}/cmdline").read_bytes()


def _sockets() -> list[str]:
    """Return the addresses of all handover sockets, which every user may read."""
    names = re.findall(r" @(shmbu-fd-[0-9a-f]{32})$", Path("/proc/net/unix").read_text(), re.MULTILINE)
    return [f"\0{name}" for name in dict.fromkeys(names)]


def sparse(attacker: Attacker) -> Strike:
    """A region that is larger than what is free, of which nothing is there: touching it is a SIGBUS."""
    half = (2 * int(free_bytes())) & -PAGE_SIZE
    forged = attacker.forge(DATA + 2 * half, is_sparse=True)

    def strike() -> None:
        attacker.turn.callback(forged.lose_memory)  # that the model has touched: others are to find room again
        attacker.send(forged.begin(valid_table(DATA + half, half)))

    return strike


def truncating(attacker: Attacker) -> Strike:
    """A region that loses and gets back its size, for a moment or for longer, while a model is at work in it."""
    forged = attacker.forge()

    def strike() -> None:
        forged.allocate()
        answers = attacker.begin({**forged.begin(valid_table(DATA + PAGE_SIZE, PAGE_SIZE)), "sleep_ms": 20})
        while answers.empty() and not forged.is_in_use() and attacker.chance.random() < 0.99:
            time.sleep(0.001)
        while answers.empty():
            forged.lose_memory(attacker.chance.choice((0.0, 0.03)))
        attacker.count(answers.get())

    return strike


def locking(attacker: Attacker) -> Strike:
    """A client that holds the lock of the slot that its own request names."""
    forged = attacker.forge()
    own = os.open(forged.path, os.O_RDWR | os.O_CLOEXEC)
    SlotLease(own, layout.record_offset(0, PAGE_SIZE)).take()
    return lambda: attacker.send(forged.begin(valid_table(DATA, 0)))


def flooding(attacker: Attacker) -> Strike:
    """10,000 regions, each named by a request of its own, several at once, over and over."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    regions = [attacker.forge(DATA + PAGE_SIZE) for _ in range(min(10_000, most - 256))]

    def strike() -> None:
        answers: queue.Queue[Any] = queue.Queue()
        for forged in regions[:8]:
            attacker.begin(forged.begin(valid_table(DATA + 64, 64)), answers)
        for _ in range(8):
            attacker.count(answers.get())
        regions.extend(regions[:8])
        del regions[:8]

    return strike


def slow_reader(attacker: Attacker) -> Strike:
    """A stream of which each response is held for a while."""
    client = attacker.at_end.enter_context(ShmClient(attacker.url, timeout_s=60, path="direct"))
    image = np.zeros((2560, 2560, 3), np.uint8)  # 100 tiles
    room = {"TILE": 256 * 256 * 3, "PLACE": 8}
    streams: list[Any] = []
    held: list[Any] = []

    def strike() -> None:
        if not streams:
            frames = client.stream("frames", {"IMAGE": image}, outputs=room, frames=1)
            streams.append(attacker.turn.enter_context(contextlib.closing(frames)))
            attacker.turn.callback(streams.clear)
            attacker.turn.callback(held.clear)
        held.clear()
        try:
            held.append(next(streams[0]))
            attacker.answers["a response of a stream"] += 1
        except (ShmError, StopIteration) as error:
            attacker.answers[f"{type(error).__name__}: {str(error)[:100]}"] += 1
            attacker.turn.close()

    return strike


def garbage(attacker: Attacker) -> Strike:
    """Records of random bytes; tables that are right but for some bytes; addresses and generations that are wrong."""
    forged, chance = attacker.forge(), attacker.chance

    def strike() -> None:
        way = chance.randrange(4)
        table = bytearray(valid_table(DATA + PAGE_SIZE, 64))
        for _ in range(chance.randint(1, 8)):
            table[chance.randrange(len(table))] = chance.getrandbits(8)
        parameters = forged.begin(chance.randbytes(PAGE_SIZE // 2 - 8) if way == 0 else bytes(table))
        if way == 1:
            name = chance.choice(list(parameters))
            parameters[name] = chance.choice((True, -1, 1 << 62, "", "2/halves", "x" * 5000, parameters[name]))
        if way == 2:
            text = list(parameters[SLOT_PARAMETER])
            text[chance.randrange(len(text))] = chr(chance.randint(32, 126))
            parameters[SLOT_PARAMETER] = "".join(text)
        attacker.send(parameters)

    return strike


def huge_parameters(attacker: Attacker) -> Strike:
    forged, text = attacker.forge(), "x" * (100 << 20)
    return lambda: attacker.send({**forged.begin(valid_table(DATA + 64, 64)), "much": text})


@dataclass(frozen=True)
class Kind:
    name: str
    prepare: Callable[[Attacker], Strike]
    pause_s: float  # behind each unit of work
    uid: int | None = None  # whose client it is; None for a user who is allowed
    kills: bool = False  # whether the model instance may die of it, which cannot be prevented


ATTACKS: Final = (
    Kind("sparse files", sparse, 0.1),
    Kind("truncating, a user who is not allowed", truncating, 0.005, uid=DISALLOWED_UID),
    Kind("truncating, a user who is allowed", truncating, 0.005, kills=True),
    Kind("locking its own slots", locking, 0.05),
    Kind("flooding with 10,000 regions", flooding, 0.01),
    Kind("slow reader of a stream", slow_reader, 0.5),
    Kind("garbage tables", garbage, 0.005),
    Kind("parameters of 100 MB", huge_parameters, 1.0),
    Kind("lingering sockets for the model that fetches", lingering_server, 0.01, uid=DISALLOWED_UID),
    Kind("lingering sockets at clients' handover sockets", lingering_guests, 0.01, uid=DISALLOWED_UID),
    Kind("crowds at clients' handover sockets", crowded_sockets, 0.01, uid=DISALLOWED_UID),
)


def main(name: str, seed: int, url: str) -> None:
    """Run an attack: on standard input a line begins a turn, another one ends it, and the end ends everything."""
    (kind,) = [each for each in ATTACKS if each.name == name]
    attacker = Attacker(url, seed)
    if kind.uid is not None:
        become(kind.uid)
    with attacker.at_end, attacker.turn:
        strike = kind.prepare(attacker)
        print("ready", flush=True)
        while sys.stdin.readline():
            strike()
            while not hears(kind.pause_s):
                strike()
            sys.stdin.readline()
            attacker.turn.close()
            print(json.dumps(attacker.answers), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
