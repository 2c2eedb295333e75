"""``scripts/gpu_check`` where there is no GPU: rehearsed on a fake driver, and whether its checks can fail."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from scripts.tools.gpu_check.__main__ import check
from scripts.tools.gpu_check.gpu import Gpu, load_fake_gpu, load_gpu
from scripts.tools.gpu_check.kernels import LIBRARIES
from scripts.tools.gpu_check.processes import client as client_process
from scripts.tools.gpu_check.processes.checks import CHECKS, many_requests
from scripts.tools.gpu_check.processes.client import Check, Client, ModelProcess
from scripts.tools.gpu_check.report import SMALL, CheckFailedError, Figure, NotOnAFakeError, Report
from shm_backend_utils.gpu.errors import CudaError
from shm_backend_utils.gpu.runtime import CudaRuntime
from shm_backend_utils.server.install import FOLDER_VARIABLE

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "gpu_check"
IN_PART = {  # where the server itself, which is not fake, would have to open memory of the fake driver
    "its models see the GPU",
    "a model serves Triton's own CUDA shared memory",
    "identity on Triton's own path, by size",
    "shm_util's regions, filled from the host, serve a model and are gone then",
    "shm_util's regions, filled from the GPU, serve a model and are gone then",
    "shm_util's regions are registered with strings in them",
}
FIGURES = [
    "two processes: identity of 64 KiB",
    "two processes: pinned to_device of 64 KiB",
    "two processes: 200 kernels on 64 KiB with SHM_GPU_EVENTS: answer",
    "a real server: identity of 64 KiB",
    "a real server: gpu_multiply of 64 KiB",
]
pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]


class Rehearsal(NamedTuple):
    status: int
    printed: str
    text: str
    content: dict[str, Any]


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory: pytest.TempPathFactory) -> Rehearsal:
    out = tmp_path_factory.mktemp("gpu_check") / "report"
    violations = tmp_path_factory.mktemp("gpu_check") / "violations"
    command = [str(SCRIPT), "--python", sys.executable, "--rehearse", "--out", str(out)]
    environment = {**os.environ, "SHM_FAKE_CUDA_VIOLATIONS": str(violations)}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=280, check=False, env=environment)
    assert not violations.exists() or violations.read_text() == ""  # nothing was done that CUDA leaves undefined
    content = json.loads((out / "report.json").read_text())
    return Rehearsal(done.returncode, done.stdout, (out / "report.txt").read_text(), content)


def test_a_rehearsal_passes_all_checks_but_those_that_need_more_than_a_fake(rehearsal: Rehearsal) -> None:
    assert {each["name"]: each for each in rehearsal.content["checks"] if each["status"] == "FAIL"} == {}
    assert {each["name"] for each in rehearsal.content["checks"] if each["status"] == "PART"} == IN_PART
    assert (rehearsal.content["failed"], rehearsal.status) == (0, 0)


def test_a_rehearsal_runs_both_levels_with_each_library_and_several_gpus(rehearsal: Rehearsal) -> None:
    ran = {(each["group"], each["name"]) for each in rehearsal.content["checks"]}
    for library in LIBRARIES.values():
        assert {(f"two processes, with {library}", name) for name in CHECKS} < ran
        server = f"a real server, with {library}"
        assert (server, "a prepared call is filled, and answered, in one allocation") in ran
    assert ("two processes, with CuPy", "several GPUs serve one execute, each in order") in ran
    assert ("a real server, with CuPy", "the sample gpu_normalize gives what NumPy gives") in ran


def test_the_report_of_a_fake_says_so_and_has_every_figure_without_a_limit(rehearsal: Rehearsal) -> None:
    title = "REHEARSAL ON A FAKE GPU: nothing here was measured on a GPU"
    assert rehearsal.content["title"] == rehearsal.text.splitlines()[0] == title
    assert rehearsal.printed == rehearsal.text
    machine = rehearsal.content["machine"]
    assert machine["GPU"].startswith("fake CUDA driver, no GPU")
    assert {"driver", "CUDA of the driver", "cuda-bindings", "CuPy", "PyTorch", "NumPy", "server"} < set(machine)
    assert "figures" not in rehearsal.content
    assert {figure["is_held"] for figure in rehearsal.content["figures_of_a_fake_gpu"]} == {None}
    _, figures = rehearsal.text.split("\nFigures of a fake GPU, which say nothing of any GPU:\n")
    assert [name for name in FIGURES if f"  {name}: " not in figures] == []


def test_without_the_bindings_it_ends_with_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    assert check(load_gpu, SMALL, tmp_path / "report") == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("gpu_check needs a GPU and cuda-bindings: GPU memory needs NVIDIA's cuda-bindings")
    assert re.search("\nmodels see (no GPU: )?", printed.err)  # and what a process sees that has them
    assert not (tmp_path / "report").exists()


def without_gpu(library: str) -> Gpu:
    raise CudaError("making GPU 0 ready", "CUDA_ERROR_NO_DEVICE")


def test_without_a_gpu_it_ends_with_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(without_gpu, SMALL, tmp_path) == 2
    assert "CUDA_ERROR_NO_DEVICE: no GPU is visible here" in capsys.readouterr().err


def with_neither_alone(library: str) -> Gpu:
    if library == "neither":
        return load_fake_gpu(library)
    raise ImportError(f"there is no {library}")


@pytest.fixture
def _checks_nothing_between_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scripts.tools.gpu_check.__main__.check_processes", lambda *_: None)
    monkeypatch.setattr("scripts.tools.gpu_check.__main__.measure_processes", lambda *_: None)


@pytest.mark.usefixtures("_checks_nothing_between_processes")
@pytest.mark.parametrize(
    ("asked_for", "status", "found"),
    [
        (
            ("torch",),
            1,
            "FAIL  this machine: PyTorch can be used (it was asked for, and cannot be used: there is no torch)",
        ),
        ((), 0, "not checked with PyTorch: there is no torch"),
    ],
)
def test_a_library_that_is_not_there_is_named_and_a_failure_if_it_was_asked_for(
    asked_for: tuple[str, ...], status: int, found: str, tmp_path: Path
) -> None:
    assert check(with_neither_alone, SMALL, tmp_path, (1,), asked_for) == status
    assert found in (tmp_path / "report.txt").read_text()


@pytest.mark.usefixtures("_checks_nothing_between_processes")
@pytest.mark.parametrize("levels", [(2,), (1, 2)])
def test_without_a_server_level_2_is_a_failure_that_says_how_to_do_without(
    levels: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "nowhere"))
    assert check(load_fake_gpu, SMALL, tmp_path, levels, ("neither",)) == 1
    text = (tmp_path / "report.txt").read_text()
    assert "FAIL  a real server: a server starts with the models (there is no server where this package" in text
    assert "--level 1 does without" in text
    assert "\nserver: none\n" in text


def test_a_rehearsal_must_say_where_its_report_goes() -> None:
    done = subprocess.run(
        [str(SCRIPT), "--python", sys.executable, "--rehearse"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "--rehearse needs --out" in done.stderr


def test_a_fake_is_never_taken_for_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load_fake_gpu("neither")
    assert check(load_gpu, SMALL, tmp_path / "report") == 2
    assert "what is found as a driver is a fake CUDA driver, no GPU; --rehearse is for that" in capsys.readouterr().err
    assert not (tmp_path / "report").exists()


def closes_no_handle(cuda: CudaRuntime) -> None:
    def fail(address: int, device: int) -> None:
        raise CudaError("closing", "CUDA_ERROR_INVALID_VALUE")

    cuda.close = fail  # type: ignore[method-assign]


def waits_for_nothing(cuda: CudaRuntime) -> None:
    cuda.synchronize_event = lambda event: None  # type: ignore[method-assign]
    cuda.synchronize_device = lambda device: None  # type: ignore[method-assign]


def ignores_events(cuda: CudaRuntime) -> None:
    cuda.wait_for_event = lambda event, stream: None  # type: ignore[method-assign]


def ignores_words(cuda: CudaRuntime) -> None:
    cuda.wait_for_word = lambda address, least, stream: None  # type: ignore[method-assign]


def waits_on_the_host(cuda: CudaRuntime) -> None:
    cuda.wait_for_word = lambda address, least, stream: cuda.synchronize_device(0)  # type: ignore[method-assign]


def pins_nothing(cuda: CudaRuntime) -> None:
    def refuse(address: int, byte_size: int) -> None:
        raise CudaError("pinning", "CUDA_ERROR_OUT_OF_MEMORY")

    cuda.pin = refuse  # type: ignore[method-assign]


def overstates_extents(cuda: CudaRuntime) -> None:
    extent = cuda.extent
    cuda.extent = lambda address, device: (extent(address, device)[0], 2**60)  # type: ignore[method-assign]


def load_defective(defect: Callable[[CudaRuntime], None]) -> Gpu:
    gpu = load_fake_gpu("neither")
    defect(gpu.runtime)
    return gpu


MANY_REQUESTS = "many requests"
NAMED = "a stream that the model has named is waited for, once, and nothing else is"
UNNAMED = "without a name the whole GPU is waited for"
BY_EVENT = "with SHM_GPU_EVENTS the client's stream waits for the model's GPU, and no host does"
LENT = "a tensor inside another allocation is used where it is, and unmapped before the answer"


@pytest.mark.parametrize(
    ("defect", "check_name", "complaint"),
    [
        (closes_no_handle, MANY_REQUESTS, "the model has not let go of memory that was given up"),
        (closes_no_handle, LENT, "the model has the tensor still mapped after turn 0"),
        (waits_for_nothing, NAMED, "the output was sent too early in turn 0"),
        (waits_for_nothing, UNNAMED, "the output was sent too early in turn 0"),
        (ignores_events, NAMED, "the output was sent too early in turn 0"),
        (ignores_events, "DLPack hands memory from stream to stream in order", "the consumer read before"),
        (pins_nothing, "SHM_PIN_HOST_MEMORY pins a region once, and undoes it", "memory is CPU; expected CPU_PINNED"),
        (overstates_extents, "a size beyond the allocation is refused", "the model has served it"),
    ],
)
def test_a_check_finds_a_model_whose_gpu_is_not_as_it_must_be(
    defect: Callable[[CudaRuntime], None], check_name: str, complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    find(complaint, check_name, load_fake_gpu("neither"), functools.partial(load_defective, defect), monkeypatch)


@pytest.mark.parametrize(
    ("defect", "complaint"),
    [
        (ignores_words, "the output was read too early in turn 0"),
        (waits_on_the_host, "the client's host has waited for the model's GPU"),
    ],
)
def test_a_check_finds_a_client_whose_gpu_is_not_as_it_must_be(
    defect: Callable[[CudaRuntime], None], complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = functools.partial(load_fake_gpu, "neither")
    find(complaint, BY_EVENT, load_defective(defect), load, monkeypatch)


def find(
    complaint: str, check_name: str, gpu: Gpu, load_model: Callable[[], Gpu], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_process, "_LET_GO_S", 2.0)
    checks: dict[str, Check] = {**CHECKS, MANY_REQUESTS: lambda client: many_requests(client, SMALL)}
    with ModelProcess(load_model) as model, Client(gpu, model) as client:
        with pytest.raises(CheckFailedError, match=complaint):
            checks[check_name](client)
        model.kill()
    gpu.destroy_stream()


@pytest.mark.parametrize(
    ("limits", "is_held", "has_failed"),
    [
        ({}, None, False),
        ({"at_most": 1.2}, True, False),
        ({"at_most": 1.1}, False, True),
        ({"at_least": 1.2}, True, False),
        ({"at_least": 1.3}, False, True),
    ],
)
def test_a_figure_beyond_its_limit_fails_its_check(
    limits: dict[str, float], is_held: bool | None, has_failed: bool, tmp_path: Path
) -> None:
    figure = Figure("figure", 1.2, "× something", "1.2 ms / 1 ms", **limits)  # type: ignore[arg-type]
    report = Report("title", {}, tmp_path, is_fake=False)
    report.measure("group", "name", lambda: [figure])
    assert report.finish() is not has_failed
    assert figure.is_held is is_held
    (written,) = json.loads((tmp_path / "report.json").read_text())["figures"]
    assert written["is_held"] is is_held
    assert ("NOT HELD" in (tmp_path / "report.txt").read_text()) is (is_held is False)


@pytest.mark.parametrize(
    ("error", "has_trace"),
    [
        (NotOnAFakeError("a GPU alone goes on here"), False),
        (CheckFailedError("it is not so"), False),
        (ZeroDivisionError("a defect of the check"), True),
    ],
)
def test_a_check_that_raises_ends_alone(error: Exception, has_trace: bool, tmp_path: Path) -> None:
    def fail() -> str:
        raise error

    report = Report("title", {}, tmp_path, is_fake=False)
    report.run("group", "name", fail)
    (outcome,) = report.outcomes
    assert (outcome.status, bool(outcome.trace)) == ("FAIL", has_trace)
    assert json.loads((tmp_path / "report.json").read_text())["checks"][0]["detail"] == outcome.detail
    assert "FAIL  group: name (" in (tmp_path / "report.txt").read_text()
