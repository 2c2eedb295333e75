"""Programs of their own that fork: to fork pytest, with its threads, would prove nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

__all__ = ["ENDINGS", "run_program"]

SHM = Path("/dev/shm")
LONG_S = 60

ENDINGS = ("os._exit", "sys.exit")
"""How a child may end, beside ``"multiprocessing"``: at once, or by way of its interpreter's own end."""

# `in_child` does some work in a forked child, which then collects its garbage and ends.
FORKING = """
import gc, multiprocessing, os, sys
ENDING = {ending!r}

def whole(work):
    work()
    gc.collect()

def in_child(work):
    if ENDING == "multiprocessing":
        process = multiprocessing.get_context("fork").Process(target=whole, args=(work,))
        process.start()
        process.join()
        assert process.exitcode == 0, f"the child ended with {{process.exitcode}}"
        return
    child = os.fork()
    if child == 0:
        whole(work)
        if ENDING == "os._exit":
            os._exit(0)
        sys.exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == 0, f"the child ended with {{status}}"
"""


def run_program(ending: str, *parts: str) -> None:
    """Run the parts of a program, one after the other; it must end well, and leave no memory behind."""
    program = "\n".join([FORKING.format(ending=ending), *map(textwrap.dedent, parts)])
    with subprocess.Popen(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", program],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
    ) as running:
        try:
            _, errors = running.communicate(timeout=LONG_S)
        except subprocess.TimeoutExpired:
            running.kill()
            raise
    left = list(SHM.glob(f"shmbu-{running.pid}-*"))
    for path in left:
        path.unlink(missing_ok=True)
    assert running.returncode == 0, errors
    assert left == []
