"""How a client of the soak learns that it is to stop."""

from __future__ import annotations

import os
import sys
import threading

__all__ = ["stop_event"]


def stop_event() -> threading.Event:
    """Return an event that is set when standard input ends: the soak wants this client to stop, or is gone."""
    event = threading.Event()

    def wait() -> None:
        os.read(sys.stdin.fileno(), 1)
        event.set()

    threading.Thread(target=wait, daemon=True).start()
    return event
