"""Kubernetes' own schemas, out of the wheel kubernetes-validate, which is not installed: it has 17,000 files."""

from __future__ import annotations

import functools
import json
import re
import zipfile
from pathlib import Path
from typing import Any, Final

import jsonschema
from referencing import Registry, Resource

from shm_backend_utils.server.wheels import appear_whole, cache_folder, fetch_wheel

__all__ = ["Schemas"]

_WHEEL: Final = "kubernetes-validate==1.37.0"


class Schemas:
    """What Kubernetes of a version wants of what it is given. Fetches 22 MB with pip, once for a machine."""

    def __init__(self) -> None:
        folder = cache_folder() / _WHEEL.replace("==", "-")
        if not folder.is_dir():
            appear_whole(folder, folder.is_dir, _fetch)
        (wheel,) = folder.glob("*.whl")
        self._archive = zipfile.ZipFile(wheel)
        self._validator = functools.cache(self._make_validator)

    def close(self) -> None:
        self._archive.close()

    def faults(self, item: dict[str, Any], version: str) -> list[str]:
        """Return what is wrong with something, unknown fields too; KeyError if no such Kubernetes has its kind."""
        group = re.sub(r"^([^./]*)(?:\.[^/]*)?/", r"\1-", item["apiVersion"])  # autoscaling/v2 is autoscaling-v2 there
        validator = self._validator(f"{item['kind'].lower()}-{group}.json", version)
        return [f"{'.'.join(map(str, error.path))}: {error.message}" for error in validator.iter_errors(item)]

    def _make_validator(self, name: str, version: str) -> Any:
        schema = self._read(name, version)
        definitions = Resource.from_contents(self._read("_definitions.json", version))
        registry: Any = definitions @ (Resource.from_contents(schema) @ Registry())
        return jsonschema.Draft202012Validator(schema, registry=registry)

    def _read(self, name: str, version: str) -> Any:
        folder = f"kubernetes_validate/kubernetes-json-schema/v{version}.0-local-strict"
        return json.loads(self._archive.read(f"{folder}/{name}"))


def _fetch(scratch: Path, fresh: Path) -> None:
    wheel = fetch_wheel(_WHEEL, "Kubernetes' schemas", scratch)
    fresh.mkdir()
    wheel.rename(fresh / wheel.name)
