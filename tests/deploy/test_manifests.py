"""docs/deploy: the Compose file, the Dockerfile and what kubectl builds, held against specifications and each other."""

from __future__ import annotations

import fnmatch
import functools
import json
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import compose_spec
import jsonschema
import pytest
import yaml
from referencing import Registry, Resource

from shm_backend_utils.server.wheels import appear_whole, cache_folder, fetch_wheel
from tests.wheels import build_wheel

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "docs" / "deploy" / "compose" / "compose.yaml"
DOCKERFILE = ROOT / "docs" / "deploy" / "docker" / "Dockerfile"
HADOLINT = Path(sys.executable).with_name("hadolint")


def test_compose_is_as_its_specification_wants_it_and_builds_stages_of_the_dockerfile() -> None:
    compose_spec.PyCompose.from_yaml(COMPOSE.read_text()).validate()
    for service in yaml.safe_load(COMPOSE.read_text())["services"].values():
        if "build" in service:
            dockerfile = (COMPOSE.parent / service["build"]["context"]).resolve() / service["build"]["dockerfile"]
            assert f" AS {service['build']['target']}\n" in dockerfile.read_text()


def copied_from_the_checkout() -> list[tuple[list[str], str]]:
    """Return what each COPY of the build's context takes, and where to."""
    lines = re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE.read_text(), re.MULTILINE)
    return [(words[:-1], words[-1]) for words in (line.split() for line in lines)]


def test_hadolint_finds_nothing() -> None:
    done = subprocess.run([HADOLINT, "--no-color", DOCKERFILE], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_all_that_is_copied_is_there_and_none_of_it_ignored() -> None:
    lines = DOCKERFILE.with_name("Dockerfile.dockerignore").read_text().splitlines()
    kept = [line[1:] for line in lines if line.startswith("!")]
    for names, _ in copied_from_the_checkout():
        for name in names:
            assert (ROOT / name).exists(), name
            assert any(name == start or fnmatch.fnmatch(name, f"{start}/*") for start in kept), name


def test_the_wheel_is_built_of_what_is_copied(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for names, target in copied_from_the_checkout():
        if target.startswith("./"):
            for name in names:
                if (ROOT / name).is_dir():
                    shutil.copytree(ROOT / name, source / target, ignore=shutil.ignore_patterns("__pycache__"))
                else:
                    shutil.copy(ROOT / name, source / target)
    with zipfile.ZipFile(build_wheel(source, tmp_path)) as archive:
        names = archive.namelist()
    assert "shm_backend_utils/model/__init__.py" in names
    assert "triton_python_backend_utils-stubs/__init__.pyi" in names


FOLDER = ROOT / "docs" / "deploy" / "kubernetes"
BUILT = ["base", "overlays/system", "overlays/two-users", "overlays/scaled-keda", "overlays/scaled-adapter"]
VERSIONS = ["1.29", "1.33", "1.37"]
WITHOUT_SCHEMA: Final = {"ScaledObject"}  # KEDA's own
UNITS: Final = {"Mi": 2**20, "Gi": 2**30}
SERVERS_OWN_BYTES: Final = 2**30
"""What docs/deployment.md reckons for the server and the processes of two small models."""
CLIENTS_OWN_BYTES: Final = 2**29


SCHEMAS: Final = "kubernetes-validate==1.37.0"


@pytest.fixture(scope="module")
def schemas() -> Iterator[zipfile.ZipFile]:
    """Kubernetes' own, in a wheel of 22 MB and 17,000 files, which pip fetches once for a machine."""

    def fetch(scratch: Path, fresh: Path) -> None:
        wheel = fetch_wheel(SCHEMAS, "Kubernetes' schemas", scratch)
        fresh.mkdir()
        wheel.rename(fresh / wheel.name)

    folder = cache_folder() / SCHEMAS.replace("==", "-")
    if not folder.is_dir():
        appear_whole(folder, folder.is_dir, fetch)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        yield archive


def faults(schemas: zipfile.ZipFile, item: dict[str, Any], version: str) -> list[str]:
    """Return what is wrong with something, unknown fields too; KeyError if no such Kubernetes has its kind."""

    def read(name: str) -> Any:
        return json.loads(schemas.read(f"kubernetes_validate/kubernetes-json-schema/v{version}.0-local-strict/{name}"))

    group = re.sub(r"^([^./]*)(?:\.[^/]*)?/", r"\1-", item["apiVersion"])  # autoscaling/v2 is autoscaling-v2 there
    schema, definitions = read(f"{item['kind'].lower()}-{group}.json"), read("_definitions.json")
    registry: Any = Resource.from_contents(definitions) @ (Resource.from_contents(schema) @ Registry())
    validator = jsonschema.Draft202012Validator(schema, registry=registry)
    return [f"{'.'.join(map(str, error.path))}: {error.message}" for error in validator.iter_errors(item)]


needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl, which builds them, is not here")


@functools.cache
def built(name: str) -> list[dict[str, Any]]:
    done = subprocess.run(["kubectl", "kustomize", FOLDER / name], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def byte_count(quantity: str) -> int:
    return int(quantity[:-2]) * UNITS[quantity[-2:]]


@pytest.mark.parametrize("version", VERSIONS)
def test_the_base_is_as_kubernetes_wants_it(schemas: zipfile.ZipFile, version: str) -> None:
    base = yaml.safe_load((FOLDER / "base" / "deployment.yaml").read_text())
    assert faults(schemas, base, version) == []


@needs_kubectl
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", BUILT)
def test_all_that_kubectl_builds_is_as_kubernetes_wants_it(schemas: zipfile.ZipFile, name: str, version: str) -> None:
    items = built(name)
    for item in items:
        if item["kind"] not in WITHOUT_SCHEMA:
            assert faults(schemas, item, version) == []


@needs_kubectl
@pytest.mark.parametrize("name", BUILT)
def test_limits_count_shared_memory(name: str) -> None:
    """As the formula of docs/deployment.md has it: who touches a page first is charged for it."""
    (pod,) = [item["spec"]["template"]["spec"] for item in built(name) if item["kind"] == "Deployment"]
    containers = {container["name"]: container for container in pod["containers"]}
    limits = {name: byte_count(each["resources"]["limits"]["memory"]) for name, each in containers.items()}
    (pool,) = [int(each["value"]) for each in containers["application"]["env"] if each["name"] == "POOL_BYTES"]
    (shm,) = [byte_count(each["emptyDir"]["sizeLimit"]) for each in pod["volumes"] if each["name"] == "shm"]
    mounts = [mount["mountPath"] for mount in containers["application"].get("volumeMounts", [])]
    assert limits["application"] >= CLIENTS_OWN_BYTES + pool
    assert shm - (pool if "/dev/shm" in mounts else 0) >= 512 * 2**20
    # What the client has in /dev/shm may be charged to the server, where that is restarted and reads it first.
    assert limits["triton"] >= SERVERS_OWN_BYTES + shm + pool


def test_the_adapters_rule_makes_the_metric_that_the_autoscaler_asks_for() -> None:
    values = yaml.safe_load((FOLDER / "overlays" / "scaled-adapter" / "adapter-values.yaml").read_text())
    (rule,) = values["rules"]["custom"]
    written = [item for file in FOLDER.rglob("*.yaml") for item in yaml.safe_load_all(file.read_text())]
    (autoscaler,) = [item for item in written if item.get("kind") == "HorizontalPodAutoscaler"]
    (metric,) = autoscaler["spec"]["metrics"]
    assert metric["pods"]["metric"]["name"] == rule["name"]["as"]
    assert set(rule["resources"]["overrides"]) == {"namespace", "pod"}
    for placeholder in ("<<.Series>>", "<<.LabelMatchers>>", "<<.GroupBy>>"):
        assert placeholder in rule["metricsQuery"]
