"""Programs in namespaces of their own, as in the containers of a pod. Test and program speak in lines of JSON."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

OWN_CONTAINER: Final = ("--mount", "--propagation=private", "--pid", "--fork", "--kill-child", "--mount-proc")
"""What a container has of its own in a pod: processes, and a /dev/shm of 64 MB. The network is common."""

_ROOT: Final = Path(__file__).resolve().parents[2]
_AS_ROOT: Final = ("--user", "--map-root-user")  # so that anybody may have the other namespaces
_SHM_OF_64_MB: Final = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"'
_PATIENCE_S: Final = 60.0


class Program:
    """One of the programs in elsewhere.py that runs."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.shm = Path(f"/proc/{process.pid}/root/dev/shm")

    def told(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"it has ended with the status {self._process.wait(_PATIENCE_S)}"
        return json.loads(line)

    def go_on(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()


@contextlib.contextmanager
def running(program: str, *words: str, namespaces: tuple[str, ...], folder: Path) -> Iterator[Program]:
    """Run a program; at the end its standard input is closed, and it is to end by itself."""
    command = [sys.executable, "-m", f"{__package__}.elsewhere", program, *words]
    process = subprocess.Popen(
        _in_namespaces(command, namespaces),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=_ROOT,
        env={**os.environ, "TMPDIR": str(folder)},
    )
    with process:
        try:
            yield Program(process)
            assert process.stdin is not None
            process.stdin.close()
            assert process.wait(_PATIENCE_S) == 0
        finally:
            process.kill()  # and so the first process of its namespace, and all others there


def obstacle(namespaces: tuple[str, ...]) -> str | None:
    """Return why there are no such namespaces here; None if there are."""
    if shutil.which("unshare") is None:
        return "there is no unshare(1)"
    done = subprocess.run(_in_namespaces(["true"], namespaces), capture_output=True, text=True, check=False)
    return done.stderr.strip() or f"unshare: {done.returncode}" if done.returncode else None


def needs(*namespaces: str) -> None:
    if (reason := obstacle(namespaces)) is not None:
        pytest.skip(f"namespaces are not permitted here: {reason}")


def _in_namespaces(command: list[str], namespaces: tuple[str, ...]) -> list[str]:
    if "--mount" in namespaces:
        command = ["sh", "-c", _SHM_OF_64_MB, "sh", *command]
    return ["unshare", *(() if os.geteuid() == 0 else _AS_ROOT), *namespaces, *command]
