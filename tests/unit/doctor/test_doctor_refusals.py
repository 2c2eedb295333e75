"""What a model or a server says in place of what was asked for, and what the doctor makes of it."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from typing import Any, Final

import pytest

from shm_backend_utils import __version__
from shm_backend_utils.cli import main
from shm_backend_utils.cli.doctor import gpu_checks, model_checks, report_checks, server_checks
from shm_backend_utils.cli.doctor.examination import examine
from shm_backend_utils.cli.doctor.findings import Finding
from shm_backend_utils.cli.doctor.refusals import finding_of_refusal
from shm_backend_utils.client.errors import (
    DeadlineExceededError,
    InferenceError,
    ServerUnavailableError,
    TlsError,
    UnknownHostError,
)
from shm_backend_utils.client.paths.probe import ProbeAnswer
from shm_backend_utils.errors import MachineError, RegionGoneError, RegionRefusedError, VersionError
from shm_backend_utils.memory.process_facts import process_facts
from shm_backend_utils.model_spec import ModelSpec
from shm_backend_utils.protocol.refusals import refusal
from tests.unit.fake_server import config

GONE: Final = refusal(RegionGoneError("shm_slot is handed over by nobody"))
NOT_MINE: Final = refusal(RegionRefusedError("shm_slot", "it belongs to user 4711; add it to SHM_ALLOWED_UIDS"))
ELSEWHERE: Final = "192.0.2.1"
SAID: Final = {
    "other-protocol": (refusal(VersionError("1", 2)), "localhost"),
    "dead-stub": ("Failed to process the request(s) for model 'm_0': Stub process 'm_0' is not healthy.", "localhost"),
    "other-machine": (GONE, ELSEWHERE),
    "other-namespace": (GONE, "localhost"),
    "other-user": (NOT_MINE, "localhost"),
    "refused": (refusal(RegionRefusedError("shm_slot", "it has holes")), "localhost"),
    "no-session": ("KeyError: 'X'", "localhost"),
    "model-busy": ("[request id: <id_unknown>] Exceeds maximum queue size", "localhost"),
}
UUID: Final = "ab" * 16
ANOTHER: Final = "cd" * 16


@pytest.mark.parametrize("code", SAID)
def test_a_refusal_has_one_meaning(code: str) -> None:
    text, host = SAID[code]
    found = finding_of_refusal(ProbeAnswer(None, text), ProbeAnswer(None, text), host, "m")
    assert (found.trouble.code, found.model) == (code, "m")


def test_a_process_without_memory_says_so() -> None:
    found = finding_of_refusal(MachineError("no file descriptor is left"), None, "localhost", "m")
    assert (found.trouble.code, "no file descriptor" in found.found) == ("refused", True)


def test_memory_of_dev_shm_may_be_another_users_where_sealed_memory_is_only_gone() -> None:
    found = finding_of_refusal(ProbeAnswer(None, NOT_MINE), ProbeAnswer(None, GONE), "localhost", "m")
    assert found.trouble.code == "other-user"


NOT_REACHED: Final = {
    "unknown-host": UnknownHostError("the host of x is not known"),
    "tls": TlsError("no TLS connection"),
    "no-answer": DeadlineExceededError("the server did not answer before the deadline"),
    "not-triton": InferenceError("x answered '<html>', which is not Triton's way", "404"),
    "wrong-port": ServerUnavailableError("what listens at x speaks HTTP, and not gRPC"),
    "server-not-reachable": ServerUnavailableError("no Triton server answers at x"),
}


@pytest.mark.parametrize("code", NOT_REACHED)
def test_a_server_that_is_not_reached(code: str) -> None:
    assert server_checks.finding_of_error(NOT_REACHED[code]).trouble.code == code


INDEX: Final = {
    "library-missing": "Internal: ModuleNotFoundError: No module named 'shm_backend_utils'\n\nAt:\n  /1/model.py",
    "required-inputs": "shm_backend_utils.errors.ModelError: input 'X' of model 'm' is not optional, so Triton refuses",
    "model-not-loaded": "Internal: ValueError: no weights",
}


@pytest.mark.parametrize("code", INDEX)
def test_the_servers_reason_is_recognised(code: str) -> None:
    index = [{"name": "m", "version": "1", "state": "UNAVAILABLE", "reason": INDEX[code]}]
    (found,) = server_checks._not_loaded(index, [], None)
    assert (found.trouble.code, found.model, "\n" in found.found) == (code, "m", False)


def test_a_library_that_is_another_one_is_not_ours() -> None:
    """Though ours may have a part in the model's path, or be on the way to it."""
    reason = "Internal: ModuleNotFoundError: No module named 'torch'\n\nAt:\n  /opt/shm_backend_utils/m/1/model.py(1)"
    index = [{"name": "m", "version": "1", "state": "UNAVAILABLE", "reason": reason}]
    (found,) = server_checks._not_loaded(index, [], None)
    assert found.trouble.code == "model-not-loaded"


def codes(findings: Iterator[Finding]) -> list[str]:
    return [finding.trouble.code for finding in findings]


def spec_of(**more: Any) -> ModelSpec:
    return ModelSpec.from_config(config("m", **more))


REPORTS: Final[dict[str, tuple[dict[str, Any], dict[str, Any]]]] = {
    "other-version": ({"version": "0.0.1"}, {}),
    "numpy-2-old-stub": ({"stub_reads_numpy": False}, {}),
    "numpy-2-strings": ({"stub_reads_numpy": False}, {"dtype": "TYPE_STRING"}),
    "names-unusable": ({"knows_server": False}, {}),
}


@pytest.mark.parametrize("code", REPORTS)
def test_a_report_is_compared(code: str) -> None:
    told, more = REPORTS[code]
    report = {"version": __version__, "stub_reads_numpy": True, "knows_server": True, "numpy": "2.1"}
    assert codes(report_checks.findings_in_report(spec_of(**more), report)) == []
    assert codes(report_checks.findings_in_report(spec_of(**more), {**report, **told})) == [code]


HERE: Final = process_facts()
ANOTHER_PID: Final[dict[str, Any]] = {"namespaces": {**HERE["namespaces"], "pid": 1}}
SEES: Final[dict[str, Any]] = {"gpus": {"uuids": [UUID], "obstacle": ""}}
GPUS: Final[dict[str, tuple[gpu_checks.ClientGpus, dict[str, Any], list[str]]]] = {
    "nothing": (gpu_checks.ClientGpus((UUID,)), SEES, []),
    "no client of GPUs": (gpu_checks.ClientGpus(), SEES, []),
    "model": (gpu_checks.ClientGpus((UUID,)), {"gpus": {"uuids": [], "obstacle": "libcuda.so.1"}}, ["driver-not-seen"]),
    "client": (gpu_checks.ClientGpus((), "libcuda.so.1 was not found"), SEES, ["driver-not-seen"]),
    "another": (gpu_checks.ClientGpus((ANOTHER,)), SEES, ["gpu-not-seen"]),
    "instances": (
        gpu_checks.ClientGpus((ANOTHER,), "", {"CUDA_VISIBLE_DEVICES": f"MIG-{ANOTHER}"}),
        {**SEES, "visible_devices": {"CUDA_VISIBLE_DEVICES": f"MIG-{UUID}"}},
        ["mig"],
    ),
    "processes": (gpu_checks.ClientGpus((UUID,)), {**SEES, **ANOTHER_PID}, ["pid-namespace"]),
}


@pytest.mark.parametrize("case", GPUS)
def test_gpus_are_compared(case: str) -> None:
    client, report, expected = GPUS[case]
    assert codes(gpu_checks.findings_on_gpus(config("m"), client, report, HERE)) == expected


def test_a_client_without_the_device_of_a_driver_loads_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(gpu_checks, "_DEVICE", tmp_path / "none")
    assert gpu_checks.find_client_gpus()[:2] == ((), "")


def test_which_namespaces_differ_is_told() -> None:
    assert model_checks._apart({"namespaces": {**HERE["namespaces"], "net": 1}}, HERE) == "other namespaces: net"
    assert model_checks._apart({}, HERE) == "the namespaces are the same"


@pytest.mark.parametrize("url", ["", "http://", "localhost:none", "ftp://localhost:1", "localhost:8001/path", "a b"])
def test_a_url_that_is_none(url: str) -> None:
    found = [each.trouble.code for each in examine(url).findings]
    assert {"bad-url", "unknown-host"} & set(found)


def test_a_server_that_hangs_is_waited_for_a_bounded_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for protocol in ("http", "grpc"):
            begin = time.process_time()
            found = [
                each.trouble.code for each in examine(f"{protocol}://127.0.0.1:{silent.getsockname()[1]}").findings
            ]
            assert {"no-answer", "wrong-port", "server-not-reachable"} & set(found)
            assert time.process_time() - begin < 5


def test_a_folder_needs_no_url(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    assert main(["doctor", "localhost:8001", "--model-dir", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert main(["doctor", "--model-dir", str(tmp_path / "none")]) == 1
    assert "not-a-model" in capsys.readouterr().out
