"""What the command cannot write is one line and a status, or nothing where nobody reads on or has interrupted it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

COMMAND = [sys.executable, "-m", "shm_backend_utils"]
REGIONS = [*COMMAND, "regions"]


def test_a_full_disk_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(REGIONS, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "shm-backend-utils regions: [Errno 28] No space left on device\n"


def test_who_reads_no_further_is_told_nothing() -> None:
    with subprocess.Popen(REGIONS, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 1


def test_an_output_that_is_closed_is_one_line() -> None:
    closing = ["sh", "-c", 'exec "$@" >&-', "sh", *REGIONS]
    done = subprocess.run(closing, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "shm-backend-utils: standard output is closed\n")


def test_an_interrupt_while_modules_are_loaded_is_told_nothing_of(tmp_path: Path) -> None:
    (tmp_path / "tritonclient.py").write_text("print('loading', flush=True)\nimport time\ntime.sleep(60)\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    words = [*COMMAND, "doctor"]
    with subprocess.Popen(words, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "loading\n"
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (-signal.SIGINT, "")


def test_a_signal_while_output_waits_to_be_read_is_told_nothing_of() -> None:
    code = """if True:
        import sys
        from shm_backend_utils.cli import main, regions
        from shm_backend_utils.cli.signals import raise_on_signals
        def run(_):
            raise_on_signals()
            sys.stdout.write("x" * 2**20)
            return 0
        regions.run = run
        sys.exit(main(["regions"]))
    """
    words = [sys.executable, "-c", code]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.read(1) == b"x"  # the rest does not fit
        process.send_signal(signal.SIGTERM)
        _, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (128 + signal.SIGTERM, b"")
