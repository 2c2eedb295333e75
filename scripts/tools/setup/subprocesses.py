"""Programs that run one after another or side by side. Standard library only."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile


class StepFailedError(Exception):
    """A step of the setup failed; the message is what the command that failed had to say."""


class Subprocess:
    """A program that runs. A context manager, which ends it, as Ctrl-C does, with all that it has started."""

    def __init__(self, words: list[str]) -> None:
        self._name = words[0]
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed in __exit__
        self._process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=self._errors, start_new_session=True)

    def finish(self) -> None:
        """Wait for its end; raise StepFailedError with its standard error if it failed."""
        if self._process.wait() != 0:
            self._errors.seek(0)
            told = self._errors.read().strip()
            raise StepFailedError(told or f"{self._name} failed with status {self._process.returncode}")

    def __enter__(self) -> Subprocess:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGINT)
            self._process.wait()
        self._errors.close()


def run(words: list[str]) -> None:
    """Run a command to its end; see :meth:`Subprocess.finish`."""
    with Subprocess(words) as process:
        process.finish()
