"""The doctor in another place than the server's: tells what it finds. Its sealed memory may be out of reach, too."""

from __future__ import annotations

import json
import sys

from shm_backend_utils.cli.doctor import examine
from shm_backend_utils.memory.handover.server import REGISTRY

from .another_network import open_server_elsewhere


def main(url: str, model: str, where: str) -> None:
    key = open_server_elsewhere() if where == "elsewhere" else None
    checkup = examine(url, model)
    if key is not None:
        REGISTRY.withdraw(key.number)
    codes = sorted(finding.trouble.code for finding in checkup.findings)
    fine = [line for _, line in checkup.fine]
    found = [finding.found for finding in checkup.findings]
    print(json.dumps({"codes": codes, "fine": fine, "found": found, "status": checkup.exit_status}))


if __name__ == "__main__":
    main(*sys.argv[1:])
