"""Where the recipes are, and how what is in them is run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

EXAMPLES: Final = Path(__file__).resolve().parents[2] / "examples"
RECIPES: Final = sorted(readme.parent.name for readme in EXAMPLES.glob("*/README.md"))


def run_script(script: str, *arguments: str) -> str:
    """Run a recipe's script as a user would, and return what it prints."""
    command = [sys.executable, str(EXAMPLES / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout
