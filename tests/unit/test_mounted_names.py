"""What is mounted on a name in /dev/shm is not opened: a file of FUSE can have its opener wait for ever."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from shm_backend_utils.errors import RegionRefusedError
from shm_backend_utils.memory import descriptors, shared_file

PROGRAM = """
import subprocess, sys
from pathlib import Path
from shm_backend_utils.errors import RegionRefusedError
from shm_backend_utils.memory import reaper
from shm_backend_utils.memory.shared_file import SharedFile

name, other = Path("/dev/shm/shmbu-mounted"), Path(sys.argv[1])
other.write_bytes(bytes(4096))
name.write_bytes(bytes(4096))
subprocess.run(["mount", "--bind", str(other), str(name)], check=True)
try:
    SharedFile.open(name.name, "the region")
    sys.exit("it was opened")
except RegionRefusedError as error:
    assert "something is mounted there" in str(error), error
assert name.name not in [report.key for report in reaper.scan()]
subprocess.run(["umount", str(name)], check=True)
SharedFile.open(name.name, "the region").close()
name.unlink()
"""


def test_a_name_in_another_mount_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_file, "_mount_of", descriptors.Descriptor.fileno)  # another one for everything
    with pytest.raises(RegionRefusedError, match="something is mounted there"):
        shared_file.SharedFile.open(".", "the region")


def test_what_is_mounted_on_a_name_is_not_opened(tmp_path: Path) -> None:
    inside = ["unshare", "--mount", "--", sys.executable, "-c", PROGRAM, str(tmp_path / "other")]
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount anything")
    run = subprocess.run(inside, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
