"""Which memory a request may name: every rule, against real files in /dev/shm and a real HTTP endpoint."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shm_backend_utils.errors import MachineError, RegionGoneError, RegionRefusedError, TableError
from shm_backend_utils.gpu.memory.access import CudaAccess
from shm_backend_utils.memory.descriptors import Access
from shm_backend_utils.memory.handover.fetching import Fetcher
from shm_backend_utils.memory.managed import ManagedRegion, RegionKind
from shm_backend_utils.memory.registrations import Registration, StatusEndpoint
from shm_backend_utils.memory.shared_file import SharedFile
from shm_backend_utils.model.config import Config
from shm_backend_utils.model.mapping import policy
from shm_backend_utils.model.mapping.resolver import Resolver
from shm_backend_utils.protocol import layout
from shm_backend_utils.protocol.claims import NamedRegionClaim
from tests.unit.answering_server import telling_registrations
from tests.unit.claims_of import claim_of_region, resolved, slot_of

SHM = Path("/dev/shm")
PAGE = layout.PAGE_SIZE
FIELD = "regions[1]"
NOBODY = 65534


@pytest.fixture
def path() -> Iterator[Path]:
    """A free name without our prefix; what lies there after the test is removed."""
    path = SHM / f"foreign-{os.getpid()}-{secrets.token_hex(8)}"
    yield path
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    else:
        path.unlink(missing_ok=True)


@pytest.fixture
def registered() -> list[Any]:
    return []


@pytest.fixture
def config(registered: list[Any]) -> Iterator[Config]:
    """Config with a server that speaks the one endpoint which gives names a meaning."""
    with telling_registrations(registered) as url:
        yield Config(server_url=url)


def any_size(file: SharedFile) -> None:
    """Let every file be mapped."""


def open_it(region: ManagedRegion, config: Config | None = None) -> ManagedRegion:
    token = region.header.token.hex()
    return policy.open_managed(region.segment.key, token, config or Config(), Fetcher(1.0), FIELD)


def resolve(name: str, config: Config) -> Registration:
    with contextlib.closing(StatusEndpoint(config.server_url)) as endpoint:
        found = policy.ask([name], endpoint, config, FIELD)
        return policy.resolve(NamedRegionClaim(name), found, config, FIELD)


def entry(name: str, key: str, offset: int = 0, byte_size: int = PAGE) -> dict[str, Any]:
    return {"name": name, "key": key, "offset": offset, "byte_size": byte_size}


def refused(action: Callable[[], object], secret: str) -> str:
    with pytest.raises(RegionRefusedError) as caught:
        action()
    assert caught.value.field.startswith(FIELD)
    assert secret not in str(caught.value)
    return caught.value.reason


def refused_registration(path: Path, byte_size: int = PAGE, config: Config | None = None) -> str:
    registration = Registration(f"/{path.name}", 0, byte_size)
    return refused(lambda: policy.open_registered(registration, config or Config(), FIELD, any_size), path.name)


def test_anybodys_sealed_memory_opens_if_anybody_is_allowed_even_what_everybody_may_write_to() -> None:
    access = Access(0o666)
    with contextlib.closing(ManagedRegion.create(100, 1, kind=RegionKind.SEALED, access=access)) as region:
        open_it(region, Config(allowed_uids=None)).close()
        assert "lets every user write to it" in refused(lambda: open_it(region), region.segment.key)


def test_a_lent_region_has_its_size_and_its_slots_alone_and_a_managed_one_its_header(region: ManagedRegion) -> None:
    with contextlib.closing(Resolver(Config(), CudaAccess())) as resolver:
        for difference in (-1, 1, PAGE):
            claim = claim_of_region(region, byte_size=region.header.byte_size + difference)
            with pytest.raises(TableError, match=r"^regions\[1\].byte_size: found"):
                resolved(resolver, claim, slot_of(resolver, region))
        with pytest.raises(TableError, match="^shm_slot.slot: found 2, expected less than 2"):
            slot_of(resolver, region, 2)
    path = SHM / region.segment.key
    path.write_bytes(b"X" + path.read_bytes()[1:])
    reason = refused(lambda: open_it(region), region.segment.key)
    assert reason == "it has no header of a managed region of version 2"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_memory_of_another_user_opens_if_that_one_is_allowed(region: ManagedRegion, path: Path) -> None:
    path.write_bytes(bytes(PAGE))
    registration = Registration(f"/{path.name}", 0, PAGE)
    os.chown(path, NOBODY, -1)
    os.chown(SHM / region.segment.key, NOBODY, -1)
    assert refused(lambda: open_it(region), region.segment.key) == (
        f"it belongs to user {NOBODY}, whom the model's SHM_ALLOWED_UIDS does not allow; add the id to that parameter "
        "in config.pbtxt, if you trust this user"
    )
    assert refused_registration(path).startswith(f"it belongs to user {NOBODY}")
    for allowed in (frozenset({NOBODY}), None):
        config = Config(allowed_uids=allowed)
        open_it(region, config).close()
        policy.open_registered(registration, config, FIELD, any_size).close()


@pytest.mark.parametrize(
    ("make", "byte_size", "reason"),
    [
        (lambda path: path.symlink_to("/dev/shm"), PAGE, "the server cannot open it: it is a symbolic link"),
        (os.mkfifo, 0, "it is not a regular shared-memory object"),
        (Path.mkdir, 0, "the server cannot open it"),
        *(
            (lambda path: path.write_bytes(bytes(PAGE)), claimed, f"it claims {claimed} bytes, but {PAGE} are there")
            for claimed in (PAGE + 1, 1 << 62)
        ),
        *((Path.touch, byte_size, "") for byte_size in (0, PAGE)),
    ],
    ids=range(7),
)
def test_a_name_of_no_file_is_refused(path: Path, make: Callable[[Path], object], byte_size: int, reason: str) -> None:
    make(path)
    assert refused_registration(path, byte_size).startswith(reason)


def test_a_name_stands_for_what_the_server_says(config: Config, registered: list[Any]) -> None:
    registered += [entry("first", "/one"), entry("second", "/two", 4, 12), entry("third", "/three")]
    assert resolve("second", config) == Registration("/two", 4, 12)
    registered.append({"name": "mine", "key": "/one", "offset": "4", "byte_size": "12"})  # as protobuf's JSON has it
    assert resolve("mine", config) == Registration("/one", 4, 12)
    for name in ("yours", "First", "firs", "first "):
        with pytest.raises(RegionGoneError, match=rf"^regions\[1\] is {name!r}, which is not registered"):
            resolve(name, config)
    off = replace(config, foreign_regions=False)
    assert "SHM_FOREIGN_REGIONS is off" in refused(lambda: resolve("mine", off), "one")


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        *(
            (f"triton_python_backend_shm_region_{number}", "it is memory of Triton's Python backend")
            for number in ("1", "")
        ),
        ("shmbu-1-00", "it is a managed region; name it by its key and token"),
        *(
            (elsewhere, "it is not an object directly in /dev/shm")
            for elsewhere in ("some/where", "../etc/passwd", "/etc/passwd", "", ".", "..")
        ),
    ],
)
def test_a_forbidden_key_is_refused(config: Config, registered: list[Any], key: str, reason: str) -> None:
    for slashes in ("", "/", "//"):
        registered[:] = [entry("mine", f"{slashes}{key}")]
        with pytest.raises(RegionRefusedError) as refusal:
            resolve("mine", config)
        assert refusal.value.reason == reason or slashes == "//"


@pytest.mark.parametrize("prefix", ["mine_", ""])
def test_memory_of_the_backend_is_refused_by_any_name(config: Config, registered: list[Any], prefix: str) -> None:
    registered.append(entry("pool", f"/{prefix}{uuid.uuid4()}"))
    registered.append(entry("other", f"/{prefix}other"))
    called = replace(config, pool_prefix=prefix)
    assert "it is memory of Triton's Python backend" in refused(lambda: resolve("pool", called), prefix or "-")
    assert resolve("other", called).key == f"/{prefix}other"


def test_no_triton_is_the_machines_fault(config: Config, registered: list[Any]) -> None:
    for answer in ("text", 7, {"key": "/one"}, {"name": "mine"}):
        registered[:] = [answer]
        with pytest.raises(MachineError, match="SHM_SERVER_URL"):
            resolve("mine", config)
    for url in ("http://127.0.0.1:1", "127.0.0.1:8000", "localhost", "http://", f"{config.server_url}/elsewhere"):
        with pytest.raises(MachineError, match="SHM_SERVER_URL"):
            resolve("mine", Config(server_url=url))


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


def test_what_is_mounted_on_a_name_is_not_opened(tmp_path: Path) -> None:
    inside = ["unshare", "--mount", "--", sys.executable, "-c", PROGRAM, str(tmp_path / "other")]
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount anything")
    run = subprocess.run(inside, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
