"""Print the lines of Python, and of documents, in each folder beside its ceiling; the exit status is 1 above one.

A ceiling is today's size: lower it when you make a folder smaller.
"""

from __future__ import annotations

import argparse
import sys
from typing import Final

from . import ROOT

CEILINGS: Final = {
    "shm_backend_utils": 37_352,
    "shm_backend_utils/*.py": 1_015,
    "shm_backend_utils/cli": 2_979,
    "shm_backend_utils/client": 8_666,
    "shm_backend_utils/compat": 1_836,
    "shm_backend_utils/gpu": 3_633,
    "shm_backend_utils/http": 203,
    "shm_backend_utils/memory": 3_435,
    "shm_backend_utils/model": 5_129,
    "shm_backend_utils/protocol": 1_948,
    "shm_backend_utils/repository": 185,
    "shm_backend_utils/server": 1_189,
    "shm_backend_utils/tensors": 918,
    "shm_backend_utils/testing": 6_216,
    "scripts": 8_990,
    "scripts/tools/bench": 2_493,
    "tests": 53_475,
    "docs": 3_499,
}
"""By folder, or by pattern of files: the most lines."""


def lines_of(name: str) -> int:
    """Count the lines of Python files, or of the Markdown files of documents."""
    place = ROOT / name
    files = place.rglob("*.md" if name == "docs" else "*.py") if place.is_dir() else ROOT.glob(name)
    return sum(file.read_bytes().count(b"\n") for file in files)


def main() -> int:
    argparse.ArgumentParser(prog="scripts/lines", description=__doc__).parse_args()
    found = {name: lines_of(name) for name in CEILINGS}
    for name, lines in found.items():
        over = f"  {lines - CEILINGS[name]:,} too many" if lines > CEILINGS[name] else ""
        print(f"{name:32} {lines:7,} of {CEILINGS[name]:7,}{over}")
    return int(any(lines > CEILINGS[name] for name, lines in found.items()))


if __name__ == "__main__":
    sys.exit(main())
