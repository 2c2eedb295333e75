"""What somebody else's tests come to, in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path


def outcome_of(project: Path, tests: str, *options: str) -> tuple[int, str]:
    """Run a file of tests, and return pytest's exit status and what it printed."""
    (project / "test_it.py").write_text(textwrap.dedent(tests))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:hypothesispytest", *options],
        cwd=project,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        env={**os.environ, "PYTEST_ADDOPTS": ""},
    )
    return done.returncode, done.stdout
