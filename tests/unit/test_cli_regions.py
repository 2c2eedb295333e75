"""``shm-backend-utils regions``, run as its user runs it, whatever names others have chosen."""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shm_backend_utils import cli
from shm_backend_utils.cli import regions
from shm_backend_utils.cli.shared_memory import look_into_processes
from shm_backend_utils.memory.managed import ManagedRegion
from shm_backend_utils.memory.registrations import Registration
from tests.unit.answering_server import telling_registrations
from tests.unit.mapping.files import region_bytes


@pytest.fixture
def region(own_shm: Path, own_proc: Path) -> Iterator[ManagedRegion]:
    region = ManagedRegion.create(100, slot_count=3)
    yield region
    region.close()


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


@pytest.mark.usefixtures("region")
def test_the_table_ends_with_advice_on_what_the_dead_left(dead: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["regions"])
    advice = "2 regions in /dev/shm, 1 with a dead owner; `shm-backend-utils regions --reap` removes this user's"
    assert capsys.readouterr().out.splitlines()[-1] == advice
    assert dead.exists()


def test_reaping_removes_the_dead_and_keeps_the_living(
    region: ManagedRegion, dead: Path, own_shm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["regions", "--reap"]) == 0
    assert [path.name for path in own_shm.iterdir()] == [region.segment.key]
    _, row, summary = capsys.readouterr().out.splitlines()
    assert row.split()[0] == dead.name
    assert summary == "1 removed"


def test_a_server_tells_under_which_names_a_region_is_registered(
    region: ManagedRegion, url: str, answer: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    names = {"first": f"/{region.segment.key}", "second": region.segment.key, "other": "/other"}
    answer += [{"name": name, "key": key, "offset": 0, "byte_size": 100} for name, key in names.items()]
    assert cli.main(["regions", "--url", url]) == 0
    assert line_of(region, capsys.readouterr().out).endswith(" first, second")
    cli.main(["regions", "--json", "--url", url])
    assert object_of(region, capsys.readouterr().out)["registered_as"] == ["first", "second"]


@pytest.mark.parametrize("wrong", ["http://127.0.0.1:1", "127.0.0.1:1", "localhost"])
def test_a_server_that_does_not_answer_is_reported_and_nothing_reaped(
    dead: Path, wrong: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["regions", "--reap", "--url", wrong]) == 1
    output = capsys.readouterr()
    why = f"{wrong}: the server's HTTP endpoint, which knows what is registered, does not answer"
    assert (output.err.startswith(why), output.out) == (True, "")
    assert dead.exists()


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


@pytest.mark.parametrize("name", ["shmbu-\x1b[31mred", "shmbu-two\nlines", "shmbu-\u202ebackwards", "shmbu-\udcff"])
def test_names_are_printed_without_what_a_terminal_obeys(
    own_shm: Path, own_proc: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (own_shm / name).write_bytes(region_bytes())
    registered = {f"{name} as": Registration(f"/{name}", 0, len(region_bytes()))}
    monkeypatch.setattr(regions, "fetch_registrations", lambda url: registered)
    assert cli.main(["regions", "--url", "http://localhost"]) == 0
    _, row, _ = capsys.readouterr().out.splitlines()
    assert row.isprintable()
    assert row.count(repr(name)[1:-1]) == 2


@pytest.mark.parametrize("odd", ["\r", "\x0b", "\x0c", "\x1c", "\x85", "\u2028"], ids=ascii)
@pytest.mark.parametrize("line", ["0-1000 r 0 0:1 1 ", "0-1 r 0 ffffffffffff:ffffffffffff 1 "], ids=["own", "large"])
def test_a_file_whose_name_seems_to_be_a_line_of_its_own(odd: str, line: str, tmp_path: Path) -> None:
    folder = tmp_path / f"a{odd}{line}" / "dev" / "shm"
    folder.mkdir(parents=True)
    (folder / "x").write_bytes(bytes(4096))
    before = {each.identity for each in look_into_processes([os.getpid()]).found[0].mapped}
    with (folder / "x").open("rb") as file, mmap.mmap(file.fileno(), 4096, prot=mmap.PROT_READ):
        (found,) = look_into_processes([os.getpid()]).found
    assert {each.identity for each in found.mapped} == before
