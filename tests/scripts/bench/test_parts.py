"""The bench's parts: what it sends, how it counts, and its reports, which come back as they were written."""

from __future__ import annotations

import errno
import json
import mmap
import os
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from scripts.tools.bench.bench import FULL, resident_bytes, sealed_bytes, shared_bytes
from scripts.tools.bench.groups.own_time import functions_called
from scripts.tools.bench.pictures import PICTURES
from scripts.tools.bench.random_requests import RandomRequests
from scripts.tools.bench.rates import rate_of_threads, rate_ratio
from scripts.tools.bench.reports import COLUMNS, MEASURED_ELSEWHERE, Reports, cells_of, document_of
from scripts.tools.bench.runs import ReportError, Run, as_json, json_of, read_run
from scripts.tools.bench.ways import RegisteredPair, endless, uploads_of, varying
from scripts.tools.figures import Figure
from shm_backend_utils.cli.common import registered_regions
from shm_backend_utils.client import Result
from shm_backend_utils.dtypes import from_numpy
from shm_backend_utils.errors import NoSharedMemoryError
from shm_backend_utils.memory.kinds import RegionKind
from shm_backend_utils.memory.managed import ManagedRegion
from tests.scripts.bench.curves import MACHINE, short_run


def test_fewer_rounds_are_fewer_slow_rounds() -> None:
    amounts = FULL.with_rounds(20).with_requests(7)
    assert (amounts.rounds, amounts.slow_rounds, amounts.requests) == (20, 2, 7)
    assert FULL.with_rounds(3).slow_rounds == 1


def test_arrays_that_vary_have_lengths_around_the_one_that_was_asked_for() -> None:
    arrays = varying(4096)
    lengths = [array.nbytes for array in arrays]
    assert (min(lengths), max(lengths)) == (2048, 6144)
    assert abs(np.mean(lengths) - 4096) < 64
    assert len(set(lengths)) > 200
    given = endless(arrays, first=len(arrays) - 1)
    assert [next(given).nbytes for _ in range(2)] == [lengths[-1], lengths[0]]


def test_no_two_uploads_have_the_same_shape_and_each_has_the_sums_of_its_rows() -> None:
    uploads = uploads_of(50_000)
    sizes = [upload.x.nbytes for upload in uploads]
    assert len({upload.x.shape for upload in uploads}) == len(uploads) > 200
    assert 25_000 * 0.98 < min(sizes) < max(sizes) <= 75_000
    assert abs(np.mean(sizes) - 50_000) < 1_000
    for upload in uploads[:10]:
        assert upload.sums.tolist() == upload.x.astype(np.int64).sum(axis=1).tolist()


def test_a_rate_is_of_all_threads_each_beginning_elsewhere() -> None:
    together = threading.Barrier(3)
    firsts: list[int] = []

    def call(x: int) -> None:
        if len(firsts) < 3:
            firsts.append(x)
            together.wait(5)

    with ThreadPoolExecutor(3) as pool:
        assert rate_of_threads(pool, call, list(range(100)), threads=3, seconds=0.5) > 3
    assert len(set(firsts)) == 3


def test_a_call_that_fails_ends_the_measurement() -> None:
    def call(x: int) -> None:
        raise AssertionError("a wrong answer")

    with ThreadPoolExecutor(2) as pool, pytest.raises(AssertionError, match="a wrong answer"):
        rate_of_threads(pool, call, [1], threads=2, seconds=60)  # not waited for


def test_rates_are_compared_period_by_period() -> None:
    figure = rate_ratio("calls", {"ours": [10.0, 40.0, 30.0], "stock": [10.0, 20.0, 10.0]}, "× others", at_least=1.5)
    assert (figure.figure, figure.basis, figure.is_held) == (2.0, "30 /s / 10 /s", True)


def test_functions_of_the_package_are_counted_once_and_no_others() -> None:
    def work() -> None:
        for _ in range(2):
            from_numpy(np.dtype(np.float32), "x")
            json.dumps([1])

    assert "dtypes:from_numpy" in functions_called(work)
    assert functions_called(lambda: json.dumps([1])) == []


def test_memory_is_counted_as_it_grows() -> None:
    own, resident = "bench-test-", resident_bytes(os.getpid())
    path = Path(f"/dev/shm/{own}{os.getpid()}")
    before = shared_bytes(own)
    try:
        path.write_bytes(bytes(1 << 16))
        assert shared_bytes(own) - before == 1 << 16
    finally:
        path.unlink()
    with mmap.mmap(
        -1, 1 << 22, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    ) as held:  # the allocator might give what was resident before
        held.write(bytes(1 << 22))
        assert resident_bytes(os.getpid()) - resident > 1 << 21


class Forgetful:
    """A client whose model adds nothing."""

    def infer(self, model: str, inputs: dict[str, Any], **named: Any) -> Result:
        return Result({f"Y{name[1:]}": array for name, array in inputs.items()}, "direct", lambda: None)


def test_sealed_memory_is_counted_as_it_is_mapped() -> None:
    before = sealed_bytes(os.getpid())
    region = ManagedRegion.create(100, kind=RegionKind.SEALED)
    assert sealed_bytes(os.getpid()) - before == region.header.byte_size
    region.close()


def test_wrong_answers_to_requests_at_random_are_counted() -> None:
    requests = RandomRequests(Forgetful())  # type: ignore[arg-type]
    requests.send(50)
    assert requests.answers == 50
    assert requests.wrong > 20


# --- Triton's own shared memory


IN_USE = "Cannot unregister shared memory region 'x', it is currently in use."


class Server:
    """What a server does with registrations; it may have them in use for some time."""

    def __init__(self, *failures: str) -> None:
        self.registered: set[str] = set()
        self._failures = list(failures)

    def register_system_shared_memory(self, name: str, key: str, byte_size: int) -> None:
        assert Path(f"/dev/shm{key}").stat().st_size == byte_size
        self.registered.add(name)

    def unregister_system_shared_memory(self, name: str) -> None:
        if self._failures:
            raise InferenceServerException(self._failures.pop())
        self.registered.remove(name)


def left() -> list[Path]:
    return list(Path("/dev/shm").glob(f"bench-{os.getpid()}-*"))


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_what_is_filled_in_is_there_and_nothing_stays(protocol: str) -> None:
    server = Server()
    x = np.arange(3, dtype=np.float32)
    with ExitStack() as stack:
        pair = RegisteredPair(stack, server, protocol, 4096)
        pair.fill(x)
        source, target = sorted(left())
        assert source.read_bytes()[:12] == x.tobytes()
        assert server.registered == {source.name, target.name}
        target.write_bytes(x[::-1].tobytes())
        assert pair.received((3,)).tolist() == [2.0, 1.0, 0.0]
        assert pair.inputs[0].shape() == [3]
    assert (left(), server.registered) == ([], set())


def test_a_region_that_the_server_still_has_in_use_is_unregistered_after_that() -> None:
    server = Server(IN_USE, IN_USE)
    with ExitStack() as stack:
        RegisteredPair(stack, server, "grpc", 4096)
    assert (left(), server.registered) == ([], set())


@pytest.mark.parametrize("failures", [["no such server"], [IN_USE] * 100], ids=["of another kind", "forever in use"])
def test_another_failure_is_told_and_nothing_stays(failures: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registered_regions, "_PATIENCE_S", 0.02)
    with pytest.raises(InferenceServerException, match=failures[0]), ExitStack() as stack:
        RegisteredPair(stack, Server(*failures), "grpc", 4096)
    assert left() == []


def test_no_room_is_told_in_a_line_before_anything_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", fail)
    with pytest.raises(NoSharedMemoryError, match="^/dev/shm has no room for 4,096 bytes"), ExitStack() as stack:
        RegisteredPair(stack, Server(), "grpc", 4096)
    assert left() == []


FIGURES = [
    Figure("one", 1.0, "× another", "1 ms / 1 ms", at_most=1.2),
    Figure("two", 0.5, "× another", "1 ms / 2 ms", at_least=1.0),
    Figure("three", 3.0, "µs", "measured alone"),
]
RUN = Run(MACHINE, FIGURES, {"what": {"case": 1.5}}, short_run())
IMAGES = {f"{name}.{suffix}" for name in PICTURES for suffix in ("png", "svg")}


def test_a_row_says_whether_its_limit_is_held() -> None:
    holds = COLUMNS.index("holds")
    assert [cells_of(figure)[holds] for figure in FIGURES] == ["yes", "no", ""]
    assert [as_json(figure)["holds"] for figure in FIGURES] == [True, False, None]


def test_a_document_counts_the_limits_and_names_those_that_are_not_held() -> None:
    text = document_of(FIGURES, {"cores": "2"})
    assert "1 of 2 limits are held. Not held: two." in text
    assert all(elsewhere.name in text for elsewhere in MEASURED_ELSEWHERE)
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert all(row.count("|") in (3, 1 + len(COLUMNS)) for row in rows)


# --- files


def all_reports(folder: Path) -> Reports:
    return Reports(folder / "bench.json", folder / "docs" / "bench.md", folder / "docs" / "images" / "new")


def test_the_page_shows_the_pictures_and_says_how_both_are_made(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    reports = all_reports(tmp_path)
    reports.check()
    reports.write(RUN)
    files = {file.name for file in tmp_path.rglob("*") if file.is_file()}
    assert files == IMAGES | {"bench.json", "bench.md"}
    page = (tmp_path / "docs" / "bench.md").read_text()
    links = re.findall(r"^!\[(.+)\]\((.+)\)$", page, re.MULTILINE)
    assert links == [(picture.title, f"images/new/{name}.svg") for name, picture in PICTURES.items()]
    assert all((tmp_path / "docs" / link).is_file() for _, link in links)
    assert all(picture.caption in page for picture in PICTURES.values())
    assert "scripts/bench --json bench.json --document docs/bench.md --plot docs/images" in page


@pytest.mark.parametrize(
    ("reports", "told"),
    [
        (Reports(json=Path("none/bench.json")), "none/bench.json cannot be written: No such file or directory"),
        (Reports(json=Path()), ". cannot be written: it is a folder; expected a file"),
        (Reports(document=Path("file/bench.md")), "file/bench.md cannot be written: Not a directory"),
        (Reports(pictures=Path("file")), "file cannot be written: File exists"),
        (Reports(pictures=Path("file/images")), "file/images cannot be written: Not a directory"),
        (Reports(pictures=Path("/proc/images")), "/proc/images cannot be written: No such file or directory"),
        (Reports(pictures=Path("/proc")), "/proc cannot be written: "),
    ],
    ids=str,
)
def test_what_cannot_be_written_is_told_before_anything_is_measured(
    reports: Reports, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    with pytest.raises(ReportError) as caught:
        reports.check()
    assert str(caught.value).startswith(told)
    assert "\n" not in str(caught.value)


# --- a run as JSON


def test_what_was_written_is_read(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    file.write_text(json_of(RUN))
    found = read_run(file)
    assert found[:3] == RUN[:3]
    assert list(found.curves) == list(RUN.curves)


def changed(change: Callable[[dict[str, Any]], object]) -> str:
    content = json.loads(json_of(RUN))
    change(content)
    return json.dumps(content)


WRONG = {
    "nothing": "",
    "not JSON": "# Numbers",
    "half a file": json_of(RUN)[:500],
    "no text": "\udcff",
    "a list": "[]",
    "an object of another program": '{"machine": {}, "results": []}',
    "of a bench without pictures": changed(lambda content: content.pop("curves")),
    "a figure that is none": changed(lambda content: content["figures"].append(7)),
    "a curve that is none": changed(lambda content: content["curves"].append(None)),
    "a curve without a name": changed(lambda content: content["curves"][0].pop("line")),
    "a depth of many lists": "[" * 100_000,
}


@pytest.mark.parametrize("what", WRONG)
def test_another_file_is_refused_in_a_line(what: str, tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    file.write_text(WRONG[what], errors="surrogateescape")
    with pytest.raises(ReportError) as caught:
        read_run(file)
    assert str(caught.value).startswith(f"{file} is not what bench --json has written: ")
    assert "\n" not in str(caught.value)
