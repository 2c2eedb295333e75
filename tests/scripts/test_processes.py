"""What the tools ask /proc about processes that may end meanwhile."""

from __future__ import annotations

import os
import subprocess
import sys

from scripts.tools.processes import children, command_line, mappings, open_files


def test_a_process_is_found_with_all_that_it_holds() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert process.pid in children(os.getpid())
        assert mappings(process.pid)
        assert len(open_files(process.pid)) >= 3
        process.communicate(b"\n")


def test_of_one_that_has_ended_there_is_nothing() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    assert (children(process.pid), command_line(process.pid)) == ([], "")
    assert (mappings(process.pid), open_files(process.pid)) == ([], [])
