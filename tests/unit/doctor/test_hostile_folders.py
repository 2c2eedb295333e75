"""A folder may hold anything under the names that the doctor looks for: it ends with a finding, and runs nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from shm_backend_utils.cli.doctor import as_text
from shm_backend_utils.cli.doctor.checkup import Checkup
from shm_backend_utils.cli.doctor.folder_checks import findings_in_folder
from tests.unit.doctor.test_folder import model as model  # noqa: PLC0414  # a fixture
from tests.unit.test_source_files import device, huge, pipe


def codes(folder: Path) -> set[str]:
    return {finding.trouble.code for finding in findings_in_folder(folder)}


@pytest.mark.parametrize("make", [pipe, device, huge, Path.mkdir], ids=lambda make: make.__name__)
@pytest.mark.parametrize("name", ["config.pbtxt", "1/model.py"])
def test_what_is_no_file(name: str, make: Callable[[Path], None], model: Path) -> None:
    (model / name).unlink()
    make(model / name)
    assert codes(model) & {"unreadable", "no-model-code"}


@pytest.mark.parametrize("make", [pipe, device, huge, Path.mkdir], ids=lambda make: make.__name__)
def test_what_is_no_module_is_not_imported(make: Callable[[Path], None], model: Path) -> None:
    make(model / "1" / "helper.py")
    assert codes(model) == set()


def test_code_is_not_run(model: Path, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    for name in ("1/model.py", "1/helper.py", "conftest.py"):
        with (model / name).open("a") as file:
            file.write(f"\nopen({str(mark)!r}, 'w')\n")
    codes(model)
    assert not mark.exists()


def test_what_the_parser_warns_of_is_not_printed(model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with (model / "1" / "model.py").open("a") as file:
        file.write("\nX = '\\d \x1b[31m' is 1\n")
    codes(model)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    "line",
    [
        "[" * 100_000,
        "input { " * 5000,
        f'parameters {{ key: "SHM_ALLOWED_UIDS" value {{ string_value: "{"9" * 5000}" }} }}',
        f'default_model_filename: "{"x" * 5000}"',
    ],
    ids=["brackets", "deep", "a long number", "a long name"],
)
def test_a_configuration_that_no_parser_likes(line: str, model: Path) -> None:
    with (model / "config.pbtxt").open("a") as file:
        file.write(line)
    checkup = Checkup()
    checkup.conclude(findings_in_folder(model), "nothing")
    assert checkup.exit_status == 1
    assert len(as_text(checkup)) < 10_000
