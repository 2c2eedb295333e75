"""docs/deploy/kubernetes: built as kubectl builds it, held against Kubernetes' schemas, and against itself."""

from __future__ import annotations

import functools
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from .schemas import Schemas

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "deploy" / "kubernetes"
BUILT = ["base", "overlays/system", "overlays/two-users", "overlays/scaled-keda", "overlays/scaled-adapter"]
VERSIONS = ["1.29", "1.33", "1.37"]
WITHOUT_SCHEMA: Final = {"ScaledObject"}  # KEDA's own
UNITS: Final = {"Mi": 2**20, "Gi": 2**30}
SERVERS_OWN_BYTES: Final = 2**30
"""What docs/deployment.md reckons for the server and the processes of two small models."""
CLIENTS_OWN_BYTES: Final = 2**29


@pytest.fixture(scope="module")
def schemas() -> Iterator[Schemas]:
    schemas = Schemas()
    yield schemas
    schemas.close()


needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl, which builds them, is not here")


@functools.cache
def built(name: str) -> list[dict[str, Any]]:
    done = subprocess.run(["kubectl", "kustomize", FOLDER / name], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def written() -> list[tuple[str, dict[str, Any]]]:
    """Return all that stands in files, each with the file's name."""
    found = []
    for file in sorted(FOLDER.rglob("*.yaml")):
        for item in yaml.safe_load_all(file.read_text()):
            found.append((str(file.relative_to(FOLDER)), item))
    return found


def of_kind(items: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    (item,) = [item for item in items if item["kind"] == kind]
    return item


def pod_of(items: list[dict[str, Any]]) -> dict[str, Any]:
    pod: dict[str, Any] = of_kind(items, "Deployment")["spec"]["template"]["spec"]
    return pod


def containers_of(pod: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {container["name"]: container for container in pod["containers"]}


def variables_of(container: dict[str, Any]) -> dict[str, str]:
    return {variable["name"]: variable["value"] for variable in container["env"]}


def byte_count(quantity: str) -> int:
    return int(quantity[:-2]) * UNITS[quantity[-2:]]


def memory_limit(container: dict[str, Any]) -> int:
    return byte_count(container["resources"]["limits"]["memory"])


def shm_bytes(pod: dict[str, Any]) -> int:
    (size,) = [volume["emptyDir"]["sizeLimit"] for volume in pod["volumes"] if volume["name"] == "shm"]
    return byte_count(size)


def mounts_shm(container: dict[str, Any]) -> bool:
    return any(mount["mountPath"] == "/dev/shm" for mount in container.get("volumeMounts", []))


def whole(kind: str) -> list[tuple[str, dict[str, Any]]]:
    """Return what there is of a kind in all files, each with the file's name."""
    return [(name, item) for name, item in written() if item.get("kind") == kind]


@pytest.mark.parametrize("version", VERSIONS)
def test_the_base_is_as_kubernetes_wants_it(schemas: Schemas, version: str) -> None:
    base = yaml.safe_load((FOLDER / "base" / "deployment.yaml").read_text())
    assert schemas.faults(base, version) == []


@needs_kubectl
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", BUILT)
def test_all_that_kubectl_builds_is_as_kubernetes_wants_it(schemas: Schemas, name: str, version: str) -> None:
    items = built(name)
    for item in items:
        if item["kind"] not in WITHOUT_SCHEMA:
            assert schemas.faults(item, version) == []


@needs_kubectl
@pytest.mark.parametrize("name", BUILT)
def test_limits_count_shared_memory(name: str) -> None:
    """As the formula of docs/deployment.md has it: who touches a page first is charged for it."""
    pod = pod_of(built(name))
    containers = containers_of(pod)
    pool = int(variables_of(containers["application"])["POOL_BYTES"])
    assert memory_limit(containers["application"]) >= CLIENTS_OWN_BYTES + pool
    pools = shm_bytes(pod) - (pool if mounts_shm(containers["application"]) else 0)
    assert pools >= 512 * 2**20
    # What the client has in /dev/shm may be charged to the server, where that is restarted and reads it first.
    assert memory_limit(containers["triton"]) >= SERVERS_OWN_BYTES + shm_bytes(pod) + pool


def test_the_adapters_rule_makes_the_metric_that_the_autoscaler_asks_for() -> None:
    values = yaml.safe_load((FOLDER / "overlays" / "scaled-adapter" / "adapter-values.yaml").read_text())
    (rule,) = values["rules"]["custom"]
    ((_, autoscaler),) = whole("HorizontalPodAutoscaler")
    (metric,) = autoscaler["spec"]["metrics"]
    assert metric["pods"]["metric"]["name"] == rule["name"]["as"]
    assert set(rule["resources"]["overrides"]) == {"namespace", "pod"}
    for placeholder in ("<<.Series>>", "<<.LabelMatchers>>", "<<.GroupBy>>"):
        assert placeholder in rule["metricsQuery"]
