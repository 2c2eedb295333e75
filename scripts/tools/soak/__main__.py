"""Send checked requests through a real server for a while, and break everything that can break meanwhile.

It starts a server of its own. The exit status is 1 if a byte was wrong, something leaked or hung, something died that
nobody had killed, a call took a second longer than its timeout, or a run of a minute or more has left out something
that a soak does. What takes root is left out without: the requests of a second user, and a /dev/shm of its own, small
enough to be filled.

With --hostile, honest clients are measured alone for a quarter of the time, and then beside hostile ones. The exit
status is 1 if a request of theirs failed, if their p99 was more than 3 times what it was alone, or if anything died of
what it should survive.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from shm_backend_utils.cli.terminal import exit_status, positive, positive_float
from shm_backend_utils.errors import MachineError
from shm_backend_utils.memory import reaper
from shm_backend_utils.testing.faults.at_hand import take_private_shm

from .hostile.assault import assault
from .hostile.attacks import ATTACKS
from .soak import Soak

SHM_BYTES: Final = 512 << 20


def run(arguments: argparse.Namespace, seed: int) -> int:
    has_private_shm = take_private_shm(SHM_BYTES)
    columns = (BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with (
        tempfile.TemporaryDirectory(prefix="shm-backend-utils-soak-") as name,
        Progress(*columns, console=Console(stderr=True), transient=True) as progress,
    ):
        task = progress.add_task("starting the server", total=arguments.seconds)
        kinds = [kind for kind in ATTACKS if arguments.with_truncation or not kind.kills]

        def on_tick(elapsed: float, text: str) -> None:
            progress.update(task, completed=elapsed, description=text)

        if arguments.hostile:
            report = assault(seed, kinds, has_private_shm, Path(name), arguments.seconds, on_tick)
        else:
            report = Soak(seed, arguments.clients, has_private_shm, Path(name)).run(arguments.seconds, on_tick)
    reaper.reap()  # what models and clients that were killed in the end have left
    report.show(Console())
    if arguments.json:
        arguments.json.write_text(json.dumps(report.as_json(), indent=2) + "\n")
    return 0 if report.is_good else 1


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/soak", description=__doc__)
    parser.add_argument("--seconds", type=positive_float, default=60.0, help="default: %(default)s")
    parser.add_argument("--clients", type=positive, default=3, metavar="K", help="default: %(default)s")
    parser.add_argument("--hostile", action="store_true", help="measure honest clients beside hostile ones instead")
    parser.add_argument(
        "--with-truncation",
        action="store_true",
        help="a user whose memory the model takes truncates it, too, which ends model instances",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report to FILE")
    parser.add_argument("--seed", type=int, metavar="N", help="of all that is left to chance; a new one if not given")
    arguments = parser.parse_args()
    seed = random.SystemRandom().getrandbits(32) if arguments.seed is None else arguments.seed
    return exit_status(lambda: run(arguments, seed), MachineError)


if __name__ == "__main__":
    sys.exit(main())
