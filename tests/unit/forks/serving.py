"""A server in a process of its own, behind a wiretap. It says where it is, and for each line that it reads, how many
connections there were, and how many bytes they brought. It lets go of those whom it holds when the line is ``go``.
"""

from __future__ import annotations

import sys
import time

from tests.e2e.wiretap import Wiretap, tapped
from tests.unit.answering_server import holding_server


def settled(wiretap: Wiretap) -> str:
    """Return the figures when nothing has come for a while."""
    before = ""
    while (now := f"{wiretap.connection_count} {len(wiretap.sent)}") != before:
        before = now
        time.sleep(0.2)
    return now


if __name__ == "__main__":
    protocol = sys.argv[1]
    with holding_server(protocol) as server, tapped(server.url.removeprefix(f"{protocol}://")) as wiretap:
        print(f"{protocol}://{wiretap.address}", flush=True)
        for line in sys.stdin:
            if line == "go\n":
                server.let_go()
            print(settled(wiretap), flush=True)
            server.hold_again()
