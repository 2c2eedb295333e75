"""Build the site into site/, every warning an error; or serve it while pages are written."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

from .. import ROOT


def main() -> int:
    """Run MkDocs, and return its exit status."""
    parser = argparse.ArgumentParser(prog="scripts/docs", description=__doc__)
    parser.add_argument("--serve", metavar="HOST:PORT", help="serve the pages there, anew as they change")
    arguments = parser.parse_args()
    how = ["build", "--quiet"] if arguments.serve is None else ["serve", "--dev-addr", arguments.serve]
    # The theme's authors tell every user of a version of MkDocs that is to come; it is none of a page's faults.
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", how[0], "--strict", *how[1:]], cwd=ROOT, env=environment, check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
