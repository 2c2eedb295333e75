"""Two containers of a pod whose users differ, as docs/deploy/kubernetes/overlays/two-users has them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from shm_backend_utils.cli.common.server import REPOSITORY, copy_models
from shm_backend_utils.server import install
from shm_backend_utils.server.install import FOLDER_VARIABLE
from tests.e2e.container import OWN_CONTAINER, obstacle

ROOT = Path(__file__).parents[2]
KUBERNETES = ROOT / "docs" / "deploy" / "kubernetes"
APPLICATION = ROOT / "docs" / "deploy" / "docker" / "application.py"
SERVER = ROOT / "tests" / "e2e" / "elsewhere.py"
PATIENCE_S: Final = 60.0

# What each has of its own: /dev/shm, and /mnt, where the server finds its files. They may lie in folders of root's, and
# Triton asks access(2) for them, which knows nothing of the capability below.
PLACES: Final = """
mount -t tmpfs -o size=64m tmpfs /dev/shm && mount -t tmpfs -o mode=1777 tmpfs /mnt && mkdir /mnt/server /mnt/models &&
mount --bind "$1" /mnt/server && mount --bind "$2" /mnt/models && shift 2 && exec "$@"
"""
# The interpreter and this checkout may lie in folders of root's, too. To read is all that a user may do more.
TO_READ: Final = (
    "--inh-caps=-all,+dac_read_search",
    "--ambient-caps=+dac_read_search",
    "--bounding-set=-all,+dac_read_search",
)


def overlay() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the pod's security context and the application's container, overlay over base."""
    base = yaml.safe_load((KUBERNETES / "base" / "deployment.yaml").read_text())
    patch = yaml.safe_load((KUBERNETES / "overlays" / "two-users" / "two-users.yaml").read_text())
    pod = patch["spec"]["template"]["spec"]
    (application,) = pod["containers"]
    return {**base["spec"]["template"]["spec"]["securityContext"], **pod["securityContext"]}, application


class Pod:
    """How a container of the pod is run: its user, its groups, and what it has of its own."""

    def __init__(self, models: Path) -> None:
        self.context, self.application = overlay()
        self._places = str(install().folder), str(models)
        self.environment = {**os.environ, "TMPDIR": "/mnt", FOLDER_VARIABLE: "/mnt/server"}

    def command(self, user: dict[str, Any], *words: str) -> list[str]:
        groups = ",".join(map(str, self.context["supplementalGroups"]))
        to_be = (f"--reuid={user['runAsUser']}", f"--regid={user['runAsGroup']}", f"--groups={groups}")
        as_user = ("setpriv", *to_be, *TO_READ, sys.executable, *words)
        return ["unshare", *OWN_CONTAINER, "sh", "-c", PLACES, "sh", *self._places, *as_user]


@pytest.fixture(scope="module")
def pod(tmp_path_factory: pytest.TempPathFactory) -> Pod:
    if os.geteuid() != 0:
        pytest.skip("only root can run programs as two other users")
    if shutil.which("setpriv") is None:
        pytest.skip("there is no setpriv(1)")
    reason = obstacle(OWN_CONTAINER)
    if reason is not None:
        pytest.skip(f"namespaces are not permitted here: {reason}")
    models = copy_models([REPOSITORY / "multiply"], tmp_path_factory.mktemp("models"))
    (allowed,) = [
        line[1:].strip()
        for line in (KUBERNETES / "overlays" / "two-users" / "kustomization.yaml").read_text().splitlines()
        if "SHM_ALLOWED_UIDS" in line
    ]
    with (models / "multiply" / "config.pbtxt").open("a") as config:
        config.write(f"\n{allowed}\n")
    models.chmod(0o755)
    return Pod(models)


@pytest.fixture(scope="module")
def server_url(pod: Pod) -> Iterator[str]:
    command = pod.command(pod.context, str(SERVER), "server", "/mnt/models", "/mnt/server.log")
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env={**pod.environment, "PYTHONPATH": str(ROOT)}, **pipes) as server:
        try:
            assert server.stdout is not None
            yield json.loads(server.stdout.readline())["grpc"]
            assert server.stdin is not None
            server.stdin.close()
            assert server.wait(PATIENCE_S) == 0
        finally:
            server.kill()


def called(pod: Pod, url: str, **further: str) -> list[str]:
    environment = {**pod.environment, "TRITON_URL": url, "CALLS": "2", "REGION": "sealed", **further}
    command = pod.command(pod.application["securityContext"], "-W", "ignore", str(APPLICATION))
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_common_group_lets_the_model_fetch_sealed_memory(pod: Pod, server_url: str) -> None:
    (group,) = [item["value"] for item in pod.application["env"] if item["name"] == "GROUP_ID"]
    told = called(pod, server_url, GROUP_ID=group)
    assert told == ["call 1: path direct, right", "call 2: path direct, right"]


def test_without_it_tensors_go_in_band(pod: Pod, server_url: str) -> None:
    assert called(pod, server_url) == ["call 1: path inline, right", "call 2: path inline, right"]
