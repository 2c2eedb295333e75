"""``shm-backend-utils top`` where it looks once, run as its user runs it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shm_backend_utils import cli
from shm_backend_utils.memory.kinds import RegionKind
from shm_backend_utils.memory.managed import ManagedRegion
from shm_backend_utils.protocol import layout
from shm_backend_utils.protocol.layout import Header
from tests.unit.top.metrics_text import MetricsServer, calls, series

POOL = "triton_python_backend_shm_region_0123"
QUICK = ["--interval", "0.1"]


@pytest.fixture
def region(folder: Path) -> Iterator[ManagedRegion]:
    """A region of this process, which is the only one that is seen."""
    (folder / "processes" / str(os.getpid())).symlink_to(f"/proc/{os.getpid()}")
    region = ManagedRegion.create(100, slot_count=3)
    yield region
    region.close()


def leave(folder: Path, name: str) -> None:
    """Leave the region of a process that is gone."""
    size = layout.data_offset(1, layout.PAGE_SIZE)
    memory = bytearray(size)
    layout.write_header(memoryview(memory), Header(1, size, bytes(16)))
    (folder / name).write_bytes(memory)


def facts(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """Return what is printed as JSON."""
    assert cli.main(["top", "--json", *QUICK, *arguments]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def page(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return what is printed for people."""
    assert cli.main(["top", "--once", *QUICK, *arguments]) == 0
    return capsys.readouterr().out


def test_a_region_its_slots_and_who_maps_it(region: ManagedRegion, capsys: pytest.CaptureFixture[str]) -> None:
    assert region.lease(1).take()
    found = facts(capsys)
    (row,) = found["regions"]
    assert row.pop("age_s") >= 0
    assert row == {
        "kind": "system",
        "name": region.segment.key,
        "byte_size": region.header.byte_size,
        "uid": os.geteuid(),
        "is_owner_alive": True,
        "slot_count": 3,
        "slots_in_use": 1,
        "pids": [os.getpid()],
    }
    (process,) = found["processes"]
    command = Path("/proc/self/comm").read_text().strip()
    assert process == {
        "pid": os.getpid(),
        "program": command,
        "regions": 1,
        "mapped_bytes": region.header.byte_size,
    }
    assert (found["pools"], found["models"], found["is_complete"]) == ([], [], True)
    assert found["space"]["shm_free_bytes"] <= found["space"]["shm_bytes"]


def test_sealed_memory_is_a_region_too(region: ManagedRegion, capsys: pytest.CaptureFixture[str]) -> None:
    sealed = ManagedRegion.create(100_000, kind=RegionKind.SEALED)
    try:
        (first, second) = facts(capsys)["regions"]
        assert (first["kind"], first["name"]) == ("sealed", f"inode {sealed.segment.identity[1]}")
        assert (first["pids"], first["is_owner_alive"]) == ([os.getpid()], True)
        assert second["kind"] == "system"
        (row,) = facts(capsys)["processes"]
        assert row["regions"] == 2
        assert row["mapped_bytes"] == sealed.header.byte_size + region.header.byte_size
    finally:
        sealed.close()


def test_the_page_has_it_all(region: ManagedRegion, capsys: pytest.CaptureFixture[str]) -> None:
    printed = page(capsys)
    row = next(line for line in printed.splitlines() if line.startswith(region.segment.key))
    assert row.split()[1:5] == ["20", "KiB", "0/3", "alive"]
    assert row.split()[-1] == str(os.getpid())
    assert "REGIONS  1, 20 KiB; 0 with a dead owner" in printed


@pytest.mark.usefixtures("folder")
def test_a_machine_without_regions(capsys: pytest.CaptureFixture[str]) -> None:
    assert "REGIONS  0, 0 B; 0 with a dead owner\n" in page(capsys)


def test_what_the_dead_left_and_what_to_do(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    leave(folder, "shmbu-1-0123456789abcdef")
    (folder / POOL).write_bytes(bytes(4096))
    printed = " ".join(page(capsys).split())
    assert "1 with a dead owner; `shm-backend-utils regions --reap` removes" in printed
    assert "1 left behind, 4 KiB: `shm-backend-utils regions` names them" in printed
    (pool,) = facts(capsys)["pools"]
    assert (pool["key"], pool["is_left_behind"], pool["pids"]) == (POOL, True, [])


@pytest.mark.usefixtures("folder")
def test_requests_by_path(server: MetricsServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.text += calls("direct", 5) + calls("triton", 2) + series("mapped_bytes", 4096, kind="gauge")
    (model,) = facts(capsys, "--metrics-url", server.url)["models"]
    assert (model["model"], model["version"], model["mapped_bytes"]) == ("multiply", "1", 4096)
    assert (model["direct_per_s"], model["triton_per_s"], model["refused_per_s"]) == (0, 0, 0)
    printed = page(capsys, "--metrics-url", server.url)
    assert "DIRECT/s" in printed
    assert any(line.startswith("multiply 1 ") for line in printed.splitlines())


@pytest.mark.usefixtures("folder")
def test_a_server_without_such_metrics_says_what_to_do(
    server: MetricsServer, capsys: pytest.CaptureFixture[str]
) -> None:
    remark = facts(capsys, "--metrics-url", server.url)["remark"]
    assert remark.startswith(f"{server.url}: no model publishes metrics: set the parameter SHM_METRICS")
    assert "SHM_METRICS" in page(capsys, "--metrics-url", server.url)


@pytest.mark.usefixtures("folder")
def test_a_server_that_nobody_named_need_not_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("shm_backend_utils.cli.top.command._DEFAULT_URL", "http://127.0.0.1:1")
    remark = facts(capsys)["remark"]
    assert remark.startswith("http://127.0.0.1:1 does not answer (Connection refused); expected Triton's metrics port")


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("how", ["--once", "--json"])
@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:1", "127.0.0.1:1", "http://", "nonsense", "", "http://[", "file:///"]
)
def test_a_server_that_does_not_answer_is_one_line(url: str, how: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["top", how, "--metrics-url", url]) == 1
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    assert "expected " in output.err


@pytest.mark.usefixtures("folder")
def test_a_server_that_is_no_triton_is_one_line(server: MetricsServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.text = "up 1\n"
    assert cli.main(["top", "--once", "--metrics-url", server.url]) == 1
    assert capsys.readouterr().err.startswith(f"{server.url} has metrics, but none of Triton's; expected")


@pytest.mark.parametrize("interval", ["0", "-1", "nan", "inf", "1e9", "soon", ""])
def test_an_interval_must_be_one(interval: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["top", "--interval", interval])
    assert "--interval" in capsys.readouterr().err


@pytest.mark.usefixtures("folder")
def test_without_a_terminal_it_looks_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["top"]) == 0
    assert "\x1b" not in capsys.readouterr().out


@pytest.mark.parametrize("name", ["shmbu-\x1b[31mred", "shmbu-two\nlines", "shmbu-\u202ebackwards", "shmbu-\udcff"])
def test_names_do_nothing_to_a_terminal(folder: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    leave(folder, name)
    printed = page(capsys)
    assert printed.replace("\n", "").isprintable()
    assert repr(name)[1:-1] in printed


def test_names_are_no_markup(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    leave(folder, "shmbu-[bold red]")
    assert "shmbu-[bold red]" in page(capsys)


@pytest.mark.usefixtures("folder")
def test_models_may_be_called_anything(server: MetricsServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.text += calls("direct", 5, model="\x1b[31mred [bold]")
    printed = page(capsys, "--metrics-url", server.url)
    assert printed.replace("\n", "").isprintable()
    assert "\\x1b[31mred" in printed


def test_programs_may_be_called_anything(
    folder: Path, region: ManagedRegion, capsys: pytest.CaptureFixture[str]
) -> None:
    process = folder / "processes" / "77"
    (process / "fd").mkdir(parents=True)
    (process / "comm").write_text("\x1b[31mred\n")
    (process / "maps").write_text(Path("/proc/self/maps").read_text())
    printed = page(capsys)
    assert printed.replace("\n", "").isprintable()
    assert "\\x1b[31mred" in printed
