"""What a file is, is known before it is mapped: whose, who may write to it, and whether there is memory for it."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shm_backend_utils.errors import MachineError, RegionRefusedError
from shm_backend_utils.memory import shared_file
from shm_backend_utils.memory.handover.fetching import Fetcher
from shm_backend_utils.memory.registrations import Registration
from shm_backend_utils.memory.shared_file import SharedFile
from shm_backend_utils.model.config import Config
from shm_backend_utils.model.mapping import policy
from tests.unit.mapping.files import NOBODY, TOKEN, managed_file, new_key

PAGE = mmap.PAGESIZE
SIZE = 4 * PAGE
FIELD = "regions[1]"

only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")

Opener = Callable[[Path, Config], Any]


def open_managed(path: Path, config: Config) -> Any:
    return policy.open_managed(path.name, TOKEN.hex(), config, Fetcher(1.0), FIELD)


def any_size(file: SharedFile) -> None:
    """Let every file be mapped."""


def open_registered(path: Path, config: Config) -> Any:
    return policy.open_registered(Registration(f"/{path.name}", 0, SIZE), config, FIELD, any_size)


BOTH_KINDS = pytest.mark.parametrize("opener", [open_managed, open_registered], ids=["managed", "registered"])


@pytest.fixture
def path() -> Iterator[Path]:
    """A managed region that has its space, under a key that may be registered as well."""
    path = managed_file(new_key(), SIZE)
    with path.open("r+b") as file:
        os.posix_fallocate(file.fileno(), 0, SIZE)
    path.chmod(0o600)
    yield path
    path.unlink(missing_ok=True)


@only_root
@BOTH_KINDS
def test_a_file_of_a_stranger_is_not_even_touched(opener: Opener, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.chown(path, NOBODY, -1)

    def touched(*_: object) -> None:
        raise AssertionError("a stranger's file was touched")

    for place in (f"{mmap.__name__}.mmap", "os.pread", "os.read", "os.posix_fallocate"):
        monkeypatch.setattr(place, touched)
    with pytest.raises(RegionRefusedError, match=f"it belongs to user {NOBODY}, whom"):
        opener(path, Config())


TOGGLER = """
import os, sys, time
os.setuid(int(sys.argv[3]))
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o600)
size = int(sys.argv[2])
page = sys.stdin.buffer.read()
print("ready", flush=True)
while True:
    os.pwrite(fd, page, 0)
    os.ftruncate(fd, size)
    os.ftruncate(fd, 0)
"""

OPENER = """
import contextlib, sys
from pathlib import Path
from shm_backend_utils.errors import RegionRefusedError
from shm_backend_utils.model.config import Config
from tests.unit.mapping import test_checked_before_mapped as test
for opener in (test.open_managed, test.open_registered):
    for _ in range(5_000):
        with contextlib.suppress(RegionRefusedError):
            opener(Path(sys.argv[1]), Config())
            sys.exit("it was opened")
"""


@only_root
def test_a_user_who_is_not_allowed_cannot_kill_the_model_by_truncating_as_it_opens(path: Path) -> None:
    header = path.read_bytes()[:PAGE]
    path.unlink()
    arguments = [sys.executable, "-c", TOGGLER, str(path), str(SIZE), str(NOBODY)]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as toggler:
        try:
            assert toggler.stdin is not None
            assert toggler.stdout is not None
            toggler.stdin.write(header)
            toggler.stdin.close()
            assert toggler.stdout.readline() == b"ready\n"
            done = subprocess.run([sys.executable, "-c", OPENER, str(path)], check=False)
        finally:
            toggler.kill()
    assert done.returncode == 0


# Mode


@BOTH_KINDS
def test_a_file_that_everybody_may_write_to_is_refused_unless_everybody_is_allowed(opener: Opener, path: Path) -> None:
    for mode in (0o602, 0o622, 0o666, 0o777):
        path.chmod(mode)
        refusal = f"its mode 0{mode:o} lets every user write to it; expected 0600, or"
        with pytest.raises(RegionRefusedError, match=refusal):
            opener(path, Config())
        opener(path, Config(allowed_uids=None)).close()
    for mode in (0o600, 0o644, 0o660, 0o664):
        path.chmod(mode)
        opener(path, Config()).close()


# Space


def test_a_managed_region_with_holes_is_refused() -> None:
    path = managed_file(new_key("shmbu"), SIZE)
    try:
        with pytest.raises(RegionRefusedError, match=f"memory for {PAGE} bytes of {SIZE}, and else holes; take"):
            open_managed(path, Config())
    finally:
        path.unlink()


def test_a_managed_region_is_mapped_as_far_as_its_header_says(path: Path) -> None:
    os.truncate(path, 2**50)
    region = open_managed(path, Config())
    assert region.segment.byte_size == SIZE
    region.close()


def test_of_a_registered_file_with_holes_the_registered_part_gets_memory(path: Path) -> None:
    os.truncate(path, 0)
    os.truncate(path, 10 * SIZE)
    policy.open_registered(Registration(f"/{path.name}", SIZE, 2 * SIZE), Config(), FIELD, any_size).close()
    assert path.stat().st_blocks * 512 == 2 * SIZE
    assert path.stat().st_size == 10 * SIZE


def test_a_registered_file_of_no_bytes_in_the_middle_of_another_opens(path: Path) -> None:
    policy.open_registered(Registration(f"/{path.name}", PAGE, 0), Config(), FIELD, any_size).close()


def test_more_holes_than_free_space_are_the_machines_fault(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.truncate(path, 2 * SIZE)
    registration = Registration(f"/{path.name}", 0, 2 * SIZE)
    taken: list[object] = []
    monkeypatch.setattr(os, "posix_fallocate", lambda *arguments: taken.append(arguments))
    monkeypatch.setattr(shared_file, "free_bytes", lambda: SIZE - 1)
    with pytest.raises(
        MachineError, match=rf"has holes, and /dev/shm has {SIZE - 1} bytes free for its {2 * SIZE}; giv"
    ):
        policy.open_registered(registration, Config(), FIELD, any_size)
    assert not taken


@pytest.mark.parametrize("key", ["/a\0b", "/\ud800"])
def test_a_key_that_no_file_can_have_is_refused(key: str) -> None:
    with pytest.raises(RegionRefusedError, match="it has a key that no file can have"):
        policy.open_registered(Registration(key, 0, SIZE), Config(), FIELD, any_size)
