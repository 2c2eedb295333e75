"""``scripts/gpu_check`` where there is no GPU: rehearsed on a fake driver, and whether its checks can fail."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from scripts.tools.figures import Figure
from scripts.tools.gpu_check.__main__ import check
from scripts.tools.gpu_check.gpu import Gpu, load_fake_gpu, load_gpu
from scripts.tools.gpu_check.kernels import LIBRARIES, Gate
from scripts.tools.gpu_check.report import SMALL, CheckFailedError, NotOnAFakeError, Report
from scripts.tools.gpu_check.server import calls
from scripts.tools.gpu_check.server import checks as checks_module
from scripts.tools.gpu_check.server import client as client_module
from scripts.tools.gpu_check.server.checks import CHECKS, ONCE
from scripts.tools.gpu_check.server.client import ServerClient, harness_clients
from shm_backend_utils.cli.common.server import models_in
from shm_backend_utils.errors import MachineError
from shm_backend_utils.gpu.errors import CudaError
from shm_backend_utils.gpu.runtime import CudaRuntime

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "gpu_check"
IN_PART = {  # where a real server would have to open memory of the fake driver, or the fake driver is too strict
    "cuMemFree and cuIpcCloseMemHandle wait for the GPU, and cuMemUnmap does not",
    "its models see the GPU",
    "a model serves Triton's own CUDA shared memory",
    "identity on Triton's own path, by size",
    "shm_util's regions, filled from the host, serve a model and are gone then",
    "shm_util's regions, filled from the GPU, serve a model and are gone then",
    "shm_util's regions are registered with strings in them",
}
FIGURES = [
    "the driver: the context of one more process",
    "processes: identity of 64 KiB",
    "processes: an input of 64 KiB, lent",
    "processes: pinned to_device of 64 KiB",
    "a real server: identity of 64 KiB",
    "a real server: a kernel on 64 KiB",
]
EARLY = "with SHM_GPU_EVENTS the answer leaves before the work, and the client's stream waits"
pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]


def test_a_rehearsal_runs_and_passes_all_checks_but_those_that_need_more_than_a_fake(tmp_path: Path) -> None:
    out, violations = tmp_path / "report", tmp_path / "violations"
    command = [str(SCRIPT), "--python", sys.executable, "--rehearse", "--out", str(out)]
    environment = {**os.environ, "SHM_FAKE_CUDA_VIOLATIONS": str(violations)}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=280, check=False, env=environment)
    assert not violations.exists() or violations.read_text() == ""  # nothing was done that CUDA leaves undefined
    text, content = (out / "report.txt").read_text(), json.loads((out / "report.json").read_text())
    assert [each["name"] for each in content["checks"] if each["status"] == "FAIL"] == []
    in_part = {each["name"] for each in content["checks"] if each["status"] == "PART"}
    assert in_part - {"a process of another user opens memory, too"} == IN_PART  # which only root can try
    assert (content["failed"], done.returncode) == (0, 0)

    ran = {(each["group"], each["name"]) for each in content["checks"]}
    for library in LIBRARIES.values():
        for level, checks in (("processes", CHECKS), ("a real server", calls.CHECKS)):
            assert {(f"{level}, with {library}", name) for name in checks} < ran
            assert (f"{level}, with {library}", "a second cycle of all this takes no more than the first") in ran
    assert {("processes", name) for name in ONCE} < ran
    assert ("a real server, with CuPy", "the sample gpu_normalize gives what NumPy gives") in ran

    assert done.stdout == text
    title = "REHEARSAL ON A FAKE GPU: nothing here was measured on a GPU"
    assert content["title"] == text.splitlines()[0] == title
    assert content["machine"]["GPU"].startswith("fake CUDA driver, no GPU")
    assert {"driver", "CUDA of the driver", "cuda-bindings", "CuPy", "PyTorch", "NumPy", "server"} < {
        *content["machine"]
    }
    assert "figures" not in content
    assert {figure["is_held"] for figure in content["figures_of_a_fake_gpu"]} == {None}
    _, figures = text.split("\nFigures of a fake GPU, which say nothing of any GPU:\n")
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
def _checks_nothing_at_level_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scripts.tools.gpu_check.__main__.check_driver", lambda *_: None)
    monkeypatch.setattr("scripts.tools.gpu_check.server.checks.check_harness", lambda *_: None)


@pytest.mark.usefixtures("_checks_nothing_at_level_1")
@pytest.mark.parametrize(
    ("asked_for", "status", "found"),
    [
        (("torch",), 1, "FAIL  this machine: PyTorch can be used (it was asked for, and cannot be used: there is no"),
        ((), 0, "not checked with PyTorch: there is no torch"),
    ],
)
def test_a_library_that_is_not_there_is_named_and_a_failure_if_it_was_asked_for(
    asked_for: tuple[str, ...], status: int, found: str, tmp_path: Path
) -> None:
    assert check(with_neither_alone, SMALL, tmp_path, (1,), asked_for) == status
    assert found in (tmp_path / "report.txt").read_text()


@pytest.mark.usefixtures("_checks_nothing_at_level_1")
@pytest.mark.parametrize("levels", [(2,), (1, 2)])
def test_without_a_server_level_2_is_a_failure_that_says_how_to_do_without(
    levels: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise MachineError("this Python has no shared library libpython3.12.so.1.0")

    monkeypatch.setattr("scripts.tools.gpu_check.server.checks.install", refuse)
    assert check(load_fake_gpu, SMALL, tmp_path, levels, ("neither",)) == 1
    text = (tmp_path / "report.txt").read_text()
    assert "FAIL  a real server: a server starts with the models (this Python has no shared library" in text
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


@pytest.fixture(autouse=True)
def _leaves_nothing_on_fake_gpus() -> None:
    """Replace the fixture of all tests: streams of the check last as long as its process."""


@pytest.fixture(autouse=True)
def _leaves_no_shared_memory() -> None:
    """Replace the fixture of all tests: the client of this module keeps one region. A rehearsal finds what leaks."""


def nothing(runtime: CudaRuntime) -> Callable[..., None]:
    return lambda *_: None


def on_the_host(runtime: CudaRuntime) -> Callable[[int, int], None]:
    return lambda event, stream: runtime.synchronize_device(0)


@pytest.fixture(scope="module")
def client() -> Iterator[ServerClient]:
    with harness_clients([load_fake_gpu("neither")], Gate.create(), SMALL) as (client,):
        yield client


@pytest.mark.parametrize(
    ("function", "defect", "check_name", "complaint"),
    [
        ("wait_for_event", nothing, "a stream that the client has named is waited for", "had not been written"),
        ("wait_for_event", nothing, "without a name in the client all streams are waited for", "had not been written"),
        ("wait_for_event", nothing, "DLPack hands memory from stream to stream in order", "stream did not wait"),
        ("record", on_the_host, "a call that has named its streams waits for no other", "waits for another one"),
        ("wait_for_word", nothing, EARLY, "the client's stream did not wait"),
    ],
)
def test_a_check_finds_a_client_that_does_not_wait_as_it_must(
    function: str, defect: Any, check_name: str, complaint: str, client: ServerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = client.gpu.runtime
    monkeypatch.setattr(runtime, function, defect(runtime))
    with client.renewed() as fresh, pytest.raises(CheckFailedError, match=complaint):
        CHECKS[check_name](fresh)


def test_a_check_finds_a_model_that_does_not_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = tmp_path / "stand_in.py"
    defect = "from shm_backend_utils.gpu.runtime import CudaRuntime as C\nC.synchronize_event = lambda *_: None\n"
    stand_in.write_text(client_module._STAND_IN.read_text() + defect)
    monkeypatch.setattr(client_module, "_STAND_IN", stand_in)
    monkeypatch.setattr(
        client_module, "models_in", lambda folder: [each for each in models_in(folder) if "gpu_work" in each.name]
    )
    with (
        harness_clients([load_fake_gpu("neither")], Gate.create(), SMALL) as (client,),
        pytest.raises(CheckFailedError, match="the model has answered, and its work had not begun"),
    ):
        CHECKS["a stream that the model has named is waited for"](client)


def test_a_second_cycle_finds_what_is_not_freed(
    client: ServerClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client.gpu.runtime, "free", nothing(client.gpu.runtime))
    monkeypatch.setattr(checks_module, "wait_until", functools.partial(client_module.wait_until, patience_s=0.5))
    report = Report({}, tmp_path, is_fake=True)
    checks_module._check_twice(report, "processes", client, {"allocate": lambda fresh: fresh.filled() and None})
    assert [each.status for each in report.outcomes] == ["PASS", "FAIL"]
    assert report.outcomes[1].detail.startswith("it has grown from _Usage(device_bytes=")


@pytest.mark.parametrize(
    ("limits", "is_held"), [({}, None), ({"at_most": 1.2}, True), ({"at_most": 1.1}, False), ({"at_least": 1.3}, False)]
)
def test_a_figure_beyond_its_limit_fails_its_check(
    limits: dict[str, float], is_held: bool | None, tmp_path: Path
) -> None:
    report = Report({}, tmp_path, is_fake=False)
    report.measure("group", "name", lambda: [Figure("figure", 1.2, "× something", "1.2 ms / 1 ms", **limits)])
    assert report.finish() is (is_held is not False)
    (written,) = json.loads((tmp_path / "report.json").read_text())["figures"]
    assert written["is_held"] is is_held
    assert ("NOT HELD" in (tmp_path / "report.txt").read_text()) is (is_held is False)


@pytest.mark.parametrize("error", [NotOnAFakeError("not here"), CheckFailedError("no"), ZeroDivisionError("a defect")])
def test_a_check_that_raises_ends_alone_and_meanwhile_the_report_says_which_runs(
    error: Exception, tmp_path: Path
) -> None:
    def fail() -> str:
        assert (tmp_path / "report.txt").read_text().endswith("RUNNING  group: name\n")
        assert json.loads((tmp_path / "report.json").read_text())["running"] == "group: name"
        raise error

    report = Report({}, tmp_path, is_fake=False)
    report.run("group", "name", fail)
    (outcome,) = report.outcomes
    assert (outcome.status, bool(outcome.trace)) == ("FAIL", isinstance(error, ZeroDivisionError))
    assert str(error) in outcome.detail
    assert json.loads((tmp_path / "report.json").read_text())["checks"][0]["detail"] == outcome.detail
    text = (tmp_path / "report.txt").read_text()
    assert ("FAIL  group: name (" in text, "RUNNING" in text) == (True, False)
