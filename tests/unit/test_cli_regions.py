"""``shm-backend-utils regions``, run as its user runs it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shm_backend_utils import cli
from shm_backend_utils.cli import regions
from shm_backend_utils.cli.shared_memory import pools, processes
from shm_backend_utils.memory import reaper, shared_file
from shm_backend_utils.memory import segment as system
from shm_backend_utils.memory.managed import ManagedRegion
from shm_backend_utils.protocol import layout
from shm_backend_utils.protocol.layout import Header
from tests.unit.answering_server import telling_registrations


@pytest.fixture
def shared_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder in the real /dev/shm for this test alone: clients of other processes reap in /dev/shm itself."""
    folder = Path(tempfile.mkdtemp(prefix="regions-", dir="/dev/shm"))
    monkeypatch.setattr(processes, "_PROC", folder)  # nor are there other processes
    for module in (reaper, pools, system, shared_file):
        monkeypatch.setattr(module, "DEV_SHM", folder)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def region(shared_memory: Path) -> Iterator[ManagedRegion]:
    assert shared_memory.exists()
    region = ManagedRegion.create(100, slot_count=3)
    yield region
    region.close()


@pytest.fixture
def dead(shared_memory: Path) -> Path:
    """The region of a process that is gone."""
    path = shared_memory / "shmbu-1-0123456789abcdef"
    size = layout.data_offset(1, layout.PAGE_SIZE)
    memory = bytearray(size)
    layout.write_header(memoryview(memory), Header(1, size, bytes(16)))
    path.write_bytes(memory)
    return path


@pytest.fixture
def answer() -> list[Any]:
    """What the server answers to the question for registered regions; a test fills it."""
    return []


@pytest.fixture
def url(answer: list[Any]) -> Iterator[str]:
    """A server that speaks the one endpoint which the command asks."""
    with telling_registrations(answer) as url:
        yield url


def line_of(region: ManagedRegion, output: str) -> str:
    return next(line for line in output.splitlines() if line.startswith(region.segment.key))


def object_of(region: ManagedRegion, output: str) -> dict[str, Any]:
    objects: list[dict[str, Any]] = [json.loads(line) for line in output.splitlines()]
    return next(found for found in objects if found.get("key") == region.segment.key)


def test_the_table_has_a_line_for_a_region(region: ManagedRegion, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["regions"]) == 0
    output = capsys.readouterr().out
    header, *_, summary = output.splitlines()
    assert header.split() == ["REGION", "SIZE", "USER", "OWNER", "AGE", "IN", "USE", "REGISTERED", "AS"]
    assert line_of(region, output).split()[1:3] == ["20", "KiB"]
    assert line_of(region, output).split()[-3:] == ["s", "0/3", "-"]
    assert " alive " in line_of(region, output)
    assert summary == "1 region in /dev/shm, 0 with a dead owner"


def test_the_table_counts_slots_in_use(region: ManagedRegion, capsys: pytest.CaptureFixture[str]) -> None:
    assert region.lease(2).take()
    cli.main(["regions"])
    assert " 1/3 " in line_of(region, capsys.readouterr().out)


def test_json_has_an_object_for_a_region(region: ManagedRegion, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["regions", "--json"]) == 0
    found = object_of(region, capsys.readouterr().out)
    assert found.pop("age_s") >= 0
    assert found == {
        "kind": "system",
        "key": region.segment.key,
        "byte_size": region.header.byte_size,
        "uid": os.geteuid(),
        "is_owner_alive": True,
        "slot_count": 3,
        "slots_in_use": 0,
        "registered_as": [],
    }


@pytest.mark.usefixtures("region", "dead")
def test_the_table_ends_with_advice_on_what_the_dead_left(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["regions"])
    summary = capsys.readouterr().out.splitlines()[-1]
    assert (
        summary == "2 regions in /dev/shm, 1 with a dead owner; `shm-backend-utils regions --reap` removes this user's"
    )


@pytest.mark.usefixtures("shared_memory")
def test_the_table_of_no_regions_is_its_summary(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["regions"]) == 0
    assert capsys.readouterr().out == "0 regions in /dev/shm, 0 with a dead owner\n"


def test_looking_removes_nothing(dead: Path) -> None:
    cli.main(["regions"])
    assert dead.exists()


def test_reaping_removes_the_dead_and_keeps_the_living(
    region: ManagedRegion, dead: Path, shared_memory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["regions", "--reap"]) == 0
    assert [path.name for path in shared_memory.iterdir()] == [region.segment.key]
    _, row, summary = capsys.readouterr().out.splitlines()
    assert row.split()[0] == dead.name
    assert summary == "1 removed"


def test_a_server_tells_under_which_names_a_region_is_registered(
    region: ManagedRegion, url: str, answer: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    answer += [
        {"name": "first", "key": f"/{region.segment.key}", "offset": 0, "byte_size": 100},
        {"name": "second", "key": region.segment.key, "offset": 0, "byte_size": 100},
        {"name": "other", "key": "/other", "offset": 0, "byte_size": 100},
    ]
    assert cli.main(["regions", "--url", url]) == 0
    assert line_of(region, capsys.readouterr().out).endswith(" first, second")


def test_names_are_in_json_too(
    region: ManagedRegion, url: str, answer: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    answer.append({"name": "mine", "key": region.segment.key, "offset": 0, "byte_size": 100})
    cli.main(["regions", "--json", "--url", url])
    assert object_of(region, capsys.readouterr().out)["registered_as"] == ["mine"]


@pytest.mark.parametrize("wrong", ["http://127.0.0.1:1", "127.0.0.1:1", "localhost"])
def test_a_server_that_does_not_answer_is_reported(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["regions", "--url", wrong]) == 1
    output = capsys.readouterr()
    assert output.err.startswith(
        f"{wrong}: the server's HTTP endpoint, which knows what is registered, does not answer"
    )
    assert output.out == ""


def test_a_server_that_is_no_triton_is_reported(
    url: str, answer: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    answer.append("a string where a region should be")
    assert cli.main(["regions", "--url", url]) == 1
    assert capsys.readouterr().err.startswith(f"{url}: ")


def test_nothing_is_reaped_when_the_server_does_not_answer(dead: Path) -> None:
    assert cli.main(["regions", "--reap", "--url", "http://127.0.0.1:1"]) == 1
    assert dead.exists()


def test_it_runs_as_a_module() -> None:
    region = ManagedRegion.create(100)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "shm_backend_utils", "regions", "--json"],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        assert object_of(region, done.stdout)["is_owner_alive"]
    finally:
        region.segment.unlink()
        region.close()


def test_a_command_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main([])
    assert "COMMAND" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["--json"], ["--reap"]])
def test_a_dev_shm_that_cannot_be_read_is_not_an_empty_one(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "shm").touch()
    monkeypatch.setattr(regions, "DEV_SHM", tmp_path / "shm")
    assert cli.main(["regions", *arguments]) == 1
    out, error = capsys.readouterr()
    assert out == ""
    assert error == f"{tmp_path / 'shm'} cannot be read, so nobody knows what is there: Not a directory\n"


def test_where_there_is_no_dev_shm_there_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regions, "DEV_SHM", tmp_path / "none")
    assert cli.main(["regions"]) == 0
