"""``scripts/gpu_check`` where there is no GPU: rehearsed on a fake one, and whether its checks can fail."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from scripts.tools.gpu_check.check import check, default_folder
from scripts.tools.gpu_check.fake import gpu_on, load_fake_gpu
from scripts.tools.gpu_check.gpu import Gpu, load_gpu
from scripts.tools.gpu_check.measuring import SMALL
from scripts.tools.gpu_check.processes import client as client_process
from scripts.tools.gpu_check.processes.checks import CHECKS
from scripts.tools.gpu_check.processes.client import Check, Client, ModelProcess
from scripts.tools.gpu_check.processes.figures import many_requests
from scripts.tools.gpu_check.report import CheckFailedError, Figure, Report, SkippedError
from shm_backend_utils.memory.cuda.runtime import CudaError
from shm_backend_utils.server.install import FOLDER_VARIABLE
from shm_backend_utils.testing.fake_cuda.runtime import FakeCuda

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "gpu_check"
SKIPPED_ON_A_FAKE = {
    "PyTorch writes to the client's memory by DLPack",
    "gpu_multiply serves Triton's own CUDA shared memory",
    "identity on Triton's own path, by size",
    "shm_util's regions, filled from the host, serve gpu_multiply and are gone then",
    "shm_util's regions, filled from the GPU, serve gpu_multiply and are gone then",
    "shm_util's regions are registered with strings in them",
}


@dataclass(frozen=True)
class Rehearsal:
    """What a user sees who runs the script on a fake GPU."""

    status: int
    printed: str
    text: str
    content: dict[str, Any]


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory: pytest.TempPathFactory) -> Rehearsal:
    out = tmp_path_factory.mktemp("gpu_check") / "report"
    command = [str(SCRIPT), "--python", sys.executable, "--rehearse", "--out", str(out)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=110, check=False)
    content = json.loads((out / "report.json").read_text())
    return Rehearsal(done.returncode, done.stdout, (out / "report.txt").read_text(), content)


# --- the whole check, on a fake GPU


def test_a_rehearsal_passes_all_checks_but_those_that_need_more_than_a_fake(rehearsal: Rehearsal) -> None:
    assert {each["name"]: each for each in rehearsal.content["checks"] if each["status"] == "FAIL"} == {}
    assert {each["name"] for each in rehearsal.content["checks"] if each["status"] == "SKIP"} == SKIPPED_ON_A_FAKE
    assert (rehearsal.content["failed"], rehearsal.status) == (0, 0)


def test_a_rehearsal_runs_both_levels(rehearsal: Rehearsal) -> None:
    ran = {(each["group"], each["name"]) for each in rehearsal.content["checks"]}
    assert {("two processes", name) for name in CHECKS} < ran
    assert ("a real server", "a prepared call is filled, and answered, in one allocation") in ran


def test_the_report_of_a_fake_says_so_in_its_title(rehearsal: Rehearsal) -> None:
    assert rehearsal.text.splitlines()[0] == "REHEARSAL ON A FAKE GPU: nothing here was measured on a GPU"
    assert rehearsal.content["title"] == rehearsal.text.splitlines()[0]
    assert rehearsal.content["machine"]["GPU"].startswith("a fake GPU")


def test_figures_of_a_fake_are_never_called_figures_and_have_no_limits(rehearsal: Rehearsal) -> None:
    assert "figures" not in rehearsal.content
    assert {figure["is_held"] for figure in rehearsal.content["figures_of_a_fake_gpu"]} == {None}
    assert "\nFigures of a fake GPU, which say nothing of any GPU:\n" in rehearsal.text


@pytest.mark.parametrize(
    "name",
    [
        "two processes: identity of 1 KiB: ",
        "two processes: gpu_multiply of 64 KiB: ",
        "two processes: pinned to_device of 64 KiB: ",
        "two processes: 200 kernels on 64 KiB with SHM_GPU_EVENTS: answer: ",
        "a real server: identity of 64 KiB: ",
        "a real server: gpu_multiply of 64 KiB: ",
    ],
)
def test_the_report_has_every_figure(rehearsal: Rehearsal, name: str) -> None:
    assert f"\n  {name}" in rehearsal.text


def test_the_report_is_what_was_printed(rehearsal: Rehearsal) -> None:
    assert rehearsal.printed == rehearsal.text


def test_the_report_tells_all_versions(rehearsal: Rehearsal) -> None:
    machine = rehearsal.content["machine"]
    versions = {"driver", "CUDA of the driver", "CUDA of CuPy", "CuPy", "PyTorch", "NumPy", "Python", "kernel"}
    assert set(machine) == {"date", "GPU", "server"} | versions
    assert machine["server"] == "2.51.0"


# --- where something is missing


def test_without_cupy_it_ends_with_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert check(load_gpu, SMALL, tmp_path / "report") == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("gpu_check needs a GPU and CuPy: GPU memory needs CuPy, which is not installed; ")
    assert printed.err.count("\n") == 1
    assert not (tmp_path / "report").exists()


def without_gpu() -> Gpu:
    raise CudaError("making GPU 0 current", "cudaErrorNoDevice")


def test_without_a_gpu_it_ends_with_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(without_gpu, SMALL, tmp_path) == 2
    assert "cudaErrorNoDevice: no GPU is visible here" in capsys.readouterr().err


def test_without_a_server_the_report_says_that_it_was_left_out_and_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "nowhere"))
    assert check(load_fake_gpu, SMALL, tmp_path, levels=(2,)) == 0
    text = (tmp_path / "report.txt").read_text()
    assert "SKIP  a real server: a server starts with the models (no server is installed; --server says" in text
    assert "\nserver: none\n" in text


def test_a_server_that_was_named_and_is_not_there_is_a_failure(tmp_path: Path) -> None:
    assert check(load_fake_gpu, SMALL, tmp_path, levels=(2,), server=tmp_path / "nowhere") == 1
    assert "1 failed" in (tmp_path / "report.txt").read_text()


def test_a_rehearsal_must_say_where_its_report_goes() -> None:
    done = subprocess.run(
        [str(SCRIPT), "--python", sys.executable, "--rehearse"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "--rehearse needs --out" in done.stderr


def test_the_report_of_a_gpu_is_kept_by_day_and_name() -> None:
    assert default_folder(load_fake_gpu(), "2000-01-02").parts[-3:] == ("docs", "gpu", "2000-01-02-a-fake-gpu")


# --- whether the checks can fail


def closes_no_handle(cuda: FakeCuda) -> None:
    def fail(address: int) -> None:
        raise CudaError("closing", "cudaErrorInvalidValue")

    cuda.close = fail  # type: ignore[method-assign]


def waits_for_nothing(cuda: FakeCuda) -> None:
    cuda.synchronize = lambda stream: None  # type: ignore[method-assign]


def ignores_events(cuda: FakeCuda) -> None:
    cuda.wait_for_event = lambda event, stream: None  # type: ignore[method-assign]


def asks_for_events(cuda: FakeCuda) -> None:
    def wait(event: int, stream: int) -> None:
        while not cuda.is_event_done(event):
            time.sleep(0.001)

    cuda.wait_for_event = wait  # type: ignore[method-assign]


def pins_nothing(cuda: FakeCuda) -> None:
    def refuse(address: int, byte_size: int) -> None:
        raise CudaError("pinning", "cudaErrorMemoryAllocation")

    cuda.pin = refuse  # type: ignore[method-assign]


def overstates_extents(cuda: FakeCuda) -> None:
    extent = cuda.extent
    cuda.extent = lambda address: (extent(address)[0], 2**60)  # type: ignore[method-assign]


def ignores_streams(cuda: FakeCuda) -> None:
    cuda.order = lambda first, then: None  # type: ignore[method-assign]


def load_defective(defect: Callable[[FakeCuda], None]) -> Gpu:
    cuda = FakeCuda()
    defect(cuda)
    return gpu_on(cuda)


MANY_REQUESTS = "many requests"


@pytest.mark.parametrize(
    ("defect", "check_name", "complaint"),
    [
        (closes_no_handle, MANY_REQUESTS, "the model has not let go of memory that was given up"),
        (waits_for_nothing, "what one process writes the other reads, without opening again", "the output is wrong"),
        (
            ignores_events,
            "with SHM_GPU_EVENTS the client's stream waits, and no host does",
            "the output was read too early in turn 0",
        ),
        (
            asks_for_events,
            "with SHM_GPU_EVENTS the client's stream waits, and no host does",
            "the client's host has waited for the event",
        ),
        (pins_nothing, "SHM_PIN_HOST_MEMORY pins a region once, and undoes it", "memory is CPU; expected CPU_PINNED"),
        (overstates_extents, "a size beyond the allocation is refused", "the model has served it"),
        (
            ignores_streams,
            "DLPack hands memory from stream to stream in order",
            "the consumer read before the producer had written",
        ),
    ],
)
def test_a_check_finds_a_gpu_that_is_not_as_it_must_be(
    defect: Callable[[FakeCuda], None], check_name: str, complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_process, "_LET_GO_S", 2.0)
    load = functools.partial(load_defective, defect)
    checks: dict[str, Check] = {**CHECKS, MANY_REQUESTS: lambda client: many_requests(client, SMALL)}
    with ModelProcess(load) as model, pytest.raises(CheckFailedError, match=complaint):
        checks[check_name](Client(load(), model))


@pytest.mark.parametrize(
    ("limits", "is_held"),
    [
        ({}, None),
        ({"at_most": 1.2}, True),
        ({"at_most": 1.1}, False),
        ({"at_least": 1.2}, True),
        ({"at_least": 1.3}, False),
    ],
)
def test_a_figure_beyond_its_limit_fails_its_check(
    limits: dict[str, float], is_held: bool | None, tmp_path: Path
) -> None:
    figure = Figure("figure", 1.2, "× something", "1.2 ms / 1 ms", group="group", **limits)  # type: ignore[arg-type]
    report = Report("title", {}, tmp_path, is_fake=False)
    report.run("group", "name", lambda: report.measured(figure))
    report.finish()
    assert figure.is_held is is_held
    assert report.has_failed is (is_held is False)
    (written,) = json.loads((tmp_path / "report.json").read_text())["figures"]
    assert written["is_held"] is is_held
    assert ("NOT HELD" in (tmp_path / "report.txt").read_text()) is (is_held is False)


def test_a_limit_that_does_not_bind_is_shown_and_fails_nothing(tmp_path: Path) -> None:
    figure = Figure("figure", 2, "× something", "2 ms / 1 ms", at_most=1.2, group="group", binds=False)
    report = Report("title", {}, tmp_path, is_fake=False)
    assert report.run("group", "name", lambda: report.measured(figure)).status == "PASS"
    assert "at most 1.2, NOT HELD (not binding here)" in (tmp_path / "report.txt").read_text()


@pytest.mark.parametrize(
    ("error", "status", "has_trace"),
    [
        (SkippedError("there is none"), "SKIP", False),
        (CheckFailedError("it is not so"), "FAIL", False),
        (ZeroDivisionError("a defect of the check"), "FAIL", True),
    ],
)
def test_a_check_that_raises_ends_alone(error: Exception, status: str, has_trace: bool, tmp_path: Path) -> None:
    def fail() -> str:
        raise error

    report = Report("title", {}, tmp_path, is_fake=False)
    outcome = report.run("group", "name", fail)
    assert (outcome.status, bool(outcome.trace)) == (status, has_trace)
    assert json.loads((tmp_path / "report.json").read_text())["checks"][0]["detail"] == outcome.detail
    assert f"{status}  group: name (" in (tmp_path / "report.txt").read_text()
