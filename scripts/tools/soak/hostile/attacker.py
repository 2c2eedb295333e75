"""One hostile client: waits for its turn, strikes until that is over, and tells how its requests were answered."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from typing import Final

from .attacks import ATTACKS
from .forged import Wire

READY: Final = "ready"


def main(seed: int, name: str, url: str) -> None:
    """Run the client: on standard input "go" begins a turn, "stop" ends it, and the end ends everything."""
    (kind,) = [each for each in ATTACKS if each.name == name]
    wire = Wire(url)
    wire.client.is_server_live()  # all that is imported late is read while this user may read it
    if kind.uid is not None:
        os.setgroups([])
        os.setgid(kind.uid)
        os.setuid(kind.uid)
    with contextlib.closing(kind.attack(wire, seed)) as attack:
        print(READY, flush=True)
        turn, is_over = threading.Thread(), threading.Event()

        def strike() -> None:
            while not is_over.is_set():
                attack.strike()
                is_over.wait(kind.pause_s)
            attack.pause()

        for line in sys.stdin:
            if line.strip() == "go":
                is_over.clear()
                turn = threading.Thread(target=strike)
                turn.start()
            else:
                is_over.set()
                turn.join()
                print(json.dumps(wire.answers), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
