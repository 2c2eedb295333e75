"""The doctor on a real server: each thing that is broken is found, by its code; and what is well is told, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest
from tritonclient.utils import InferenceServerException

from shm_backend_utils.cli.doctor import examine
from tests.releases import gives_up_loading
from tests.unit.harness.folders import SESSION, folder_of

from .container import OWN_CONTAINER, needs, running
from .flavours import url_of
from .loading_server import LoadingServer

HEALTHY: Final = {"numpy-2-old-stub"}
"""What may be found where all is well: the shared environment may have NumPy 2 on a stub that was built for 1."""
OF_THE_MACHINE: Final = {*("dev-shm-small", "dev-shm-full", "stale-regions", "leftover-pools", "little-memory")}
PATHS: Final = 'parameters { key: "SHM_PATHS" value: { string_value: "direct,triton-shm,inline" } }\n'
X: Final = 'input [ { name: "X" data_type: TYPE_FP32 dims: [ -1 ] optional: true } ]\n'
Y: Final = 'output [ { name: "Y" data_type: TYPE_FP32 dims: [ -1 ] } ]\n'
CPU: Final = 'backend: "python"\ninstance_group [ { kind: KIND_CPU } ]\n'
WITHOUT_SESSION: Final = """
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def execute(self, requests): return [pb_utils.InferenceResponse([]) for _ in requests]
"""


class Server:
    """The server, with models of this file's tests."""

    def __init__(self, loading: LoadingServer) -> None:
        self.loading = loading

    def url(self, protocol: str) -> str:
        return url_of(self.loading.server, protocol)

    def has(self, name: str, code: str, config: str) -> None:
        folder_of(self.loading.models, code, CPU + config, name)
        try:
            self.loading.grpc.load_model(name)
        except InferenceServerException as error:
            assert "failed" in str(error)  # noqa: PT017  # it may load, and may not

    def codes(self, name: str, protocol: str = "grpc") -> set[str]:
        return codes_of(examine(self.url(protocol), name))


def codes_of(checkup: Any) -> set[str]:
    return {finding.trouble.code for finding in checkup.findings} - OF_THE_MACHINE


@pytest.fixture
def server(loading_server: LoadingServer) -> Server:
    return Server(loading_server)


def test_a_model_that_is_well(server: Server) -> None:
    server.has("well", SESSION, X + Y + PATHS)
    for protocol in ("grpc", "http"):
        checkup = examine(server.url(protocol), "well")
        assert codes_of(checkup) - {"server-not-ready"} <= HEALTHY
        assert any("has read a nonce in sealed memory" in line for _, line in checkup.fine)
        assert server.codes("nowhere", protocol) - {"server-not-ready"} == {"no-such-model"}


def test_a_model_of_streams_is_probed_over_grpc_alone(server: Server) -> None:
    server.loading.copy("frames_of", "frames_of")
    server.loading.grpc.load_model("frames_of")
    assert any("has read a nonce" in line for _, line in examine(server.url("grpc"), "frames_of").fine)
    assert "needs-grpc" in server.codes("frames_of", "http")


BROKEN: Final = {
    "library-missing": ("import shm_backend_utils.nothing_such\n", X + Y + PATHS),
    "model-not-loaded": ("raise ValueError('no weights')\n", X + Y + PATHS),
    "required-inputs": (SESSION, X.replace("true", "false") + Y + PATHS),
    "no-session": (WITHOUT_SESSION, X + Y + PATHS),
    "other-user": (
        SESSION,
        X + Y + PATHS + 'parameters { key: "SHM_ALLOWED_UIDS" value: { string_value: "65533" } }\n',
    ),
}
FAIL_FIRST: Final = dict.fromkeys(("library-missing", "model-not-loaded"), gives_up_loading)


@pytest.mark.parametrize("code", [pytest.param(code, marks=FAIL_FIRST.get(code, ())) for code in BROKEN])
def test_what_is_broken_is_found(server: Server, code: str) -> None:
    name = code.replace("-", "_")
    server.has(name, *BROKEN[code])
    assert code in server.codes(name)


def test_the_other_protocols_port(server: Server) -> None:
    grpc, http = server.url("grpc"), server.url("http").removeprefix("http://")
    assert codes_of(examine(f"http://{grpc}")) == {"wrong-port"}
    assert codes_of(examine(f"grpc://{http}")) == {"wrong-port"}
    assert codes_of(examine(f"http://{server.loading.server.metrics_url}")) == {"not-triton"}


def elsewhere(server: Server, where: str, namespaces: tuple[str, ...], folder: Path) -> Any:
    needs(*(namespaces or ("--net",)))
    with running("doctor", server.url("grpc"), "in_pod", where, namespaces=namespaces, folder=folder) as program:
        return program.told()


def test_another_container_of_the_pod_is_well_and_what_another_network_has_not_is_told(
    server: Server, tmp_path: Path
) -> None:
    server.has("in_pod", SESSION, X + Y + PATHS)
    told = elsewhere(server, "here", OWN_CONTAINER, tmp_path)
    assert set(told["codes"]) - OF_THE_MACHINE - {"server-not-ready"} <= HEALTHY
    assert any("has a /dev/shm of its own" in line for line in told["fine"])
    told = elsewhere(server, "elsewhere", (), tmp_path)
    assert "no-sealed-memory" in told["codes"]
    assert any("has read a nonce in system memory" in line for line in told["fine"])
    told = elsewhere(server, "elsewhere", OWN_CONTAINER, tmp_path)
    assert "other-namespace" in told["codes"]
    assert told["status"] == 1
