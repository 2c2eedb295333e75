"""What a copy holds: all that the model half stands on, found in its imports, and enough to import it by."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import shm_backend_utils
from shm_backend_utils.cli import main
from shm_backend_utils.cli.vendor.parts import parts_of_model_half

PACKAGE = Path(shm_backend_utils.__file__).parent
PYPROJECT = (Path(__file__).parents[3] / "pyproject.toml").read_text()


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model that has a copy."""
    model = tmp_path_factory.mktemp("repository") / "m"
    (model / "1").mkdir(parents=True)
    (model / "1" / "model.py").touch()
    assert main(["vendor", str(model)]) == 0
    return model / "shm_backend_utils"


def test_it_is_the_layers_below_the_model_half() -> None:
    contract = PYPROJECT.partition('name = "Imports go downward only')[2].partition("[[tool")[0]
    layers = [set(re.findall(r"\w+", line)) for line in re.findall(r'^    "([^.\n]*)",$', contract, re.MULTILINE)]
    place = next(place for place, layer in enumerate(layers) if "model" in layer)
    below = set[str]().union(*layers[place + 1 :])
    assert {part.stem for part in parts_of_model_half(PACKAGE)} == {"model"} | below


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        ("from .. import a", {"a"}),
        ("from ..a import x", {"a"}),
        ("from ..a.b import x", {"a"}),
        ("import p.a.b", {"a"}),
        ("from p import a, b", {"a", "b"}),
        ("from p.a import x", {"a"}),
        ("def f():\n    from .. import a", {"a"}),
        ("import numpy, a", set()),
        ("from . import a", set()),
        ("from .. import __version__", set()),
    ],
)
def test_every_form_of_import_is_followed(tmp_path: Path, source: str, parts: set[str]) -> None:
    package = tmp_path / "p"
    (package / "model").mkdir(parents=True)
    (package / "a").mkdir()
    (package / "b.py").touch()
    (package / "model" / "m.py").write_text(source)
    assert {part.stem for part in parts_of_model_half(package)} == {"model"} | parts


def test_what_a_part_imports_is_followed_too(tmp_path: Path) -> None:
    package = tmp_path / "p"
    (package / "model").mkdir(parents=True)
    (package / "model" / "m.py").write_text("from .. import a")
    (package / "a.py").write_text("from .b import c")
    (package / "b.py").touch()
    (package / "client.py").touch()
    assert [part.name for part in parts_of_model_half(package)] == ["a.py", "b.py", "model"]


def test_every_module_of_a_copy_can_be_imported_from_it_alone(copy: Path, tmp_path: Path) -> None:
    """With NumPy and the standard library: no other package is to be found, and no checkout."""
    for place in Path(np.__file__).parents[1].glob("numpy*"):
        (tmp_path / place.name).symlink_to(place)
    modules = [
        ".".join(file.relative_to(copy.parent).with_suffix("").parts).removesuffix(".__init__")
        for file in sorted(copy.rglob("*.py"))
    ]
    program = f"""
import sys
sys.path += [{str(copy.parent)!r}, {str(tmp_path)!r}]
import importlib, types
sys.modules["triton_python_backend_utils"] = types.ModuleType("triton_python_backend_utils")
for name in {modules!r}:
    assert importlib.import_module(name).__file__.startswith({str(copy)!r}), name
from shm_backend_utils import ShmSession
from shm_backend_utils.model import ShmSession as same
assert ShmSession is same
print(len([name for name in sys.modules if name.startswith("shm_backend_utils")]))
"""
    done = subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, check=False)
    assert (done.stderr, int(done.stdout)) == ("", len(modules))


def test_a_copy_has_the_licence_and_nothing_of_other_halves(copy: Path) -> None:
    assert "Apache License" in (copy / "LICENSE").read_text()
    assert {"cli", "client", "server", "testing", "__main__.py"} & {path.name for path in copy.iterdir()} == set()
    assert (copy / "py.typed").exists()


def test_nothing_compiled_is_in_it(tmp_path: Path) -> None:
    (tmp_path / "config.pbtxt").touch()
    assert main(["vendor", str(tmp_path)]) == 0
    assert list(tmp_path.rglob("__pycache__")) == []
