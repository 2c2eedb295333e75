"""A model's folder without a server: each thing is broken in it, and found."""

from __future__ import annotations

import errno
import os
import re
import shutil
import sys
from pathlib import Path

import pytest

import shm_backend_utils
from shm_backend_utils import __version__
from shm_backend_utils.cli.doctor.checkup import Finding
from shm_backend_utils.cli.doctor.folder_checks import findings_in_folder
from shm_backend_utils.cli.doctor.troubles import ConfigTrouble, FolderTrouble, ModelTrouble, Trouble
from shm_backend_utils.protocol.layout import VERSION

PACKAGE = Path(shm_backend_utils.__file__).parent
SAMPLES = Path(__file__).parents[3] / "model_repository"
CONFIG = """
backend: "python"
input [ { name: "X" data_type: TYPE_FP32 dims: [ -1 ] optional: true } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ -1 ] } ]
parameters { key: "SHM_PATHS" value: { string_value: "direct,triton-shm,inline" } }
"""
CODE = """
from shm_backend_utils.model import ShmSession

class TritonPythonModel:
    def initialize(self, args):
        self.session = ShmSession.from_args(args)
"""
STOCK = "class TritonPythonModel:\n    def execute(self, requests): return []\n"
COMPLETING = (
    CODE
    + """
    @staticmethod
    def auto_complete_config(config):
        return config
"""
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with which nothing is wrong."""
    folder = tmp_path / "m"
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").write_text(CODE)
    (folder / "config.pbtxt").write_text(CONFIG)
    return folder


@pytest.fixture
def copy(model: Path) -> Path:
    """A copy of this library in it, as far as it is looked at."""
    copy = model / "1" / "shm_backend_utils"
    for name in ("__init__.py", "protocol/layout.py"):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(PACKAGE / name, copy / name)
    return copy


def only(findings: list[Finding], trouble: Trouble) -> str:
    assert [(finding.trouble.code, finding.model) for finding in findings] == [(trouble.code, "m")]
    assert "\n" not in findings[0].found
    return findings[0].found


@pytest.mark.usefixtures("copy")
def test_nothing_is_wrong_with_a_fine_one_that_has_a_copy_nor_with_any_of_our_samples(model: Path) -> None:
    assert findings_in_folder(model) == findings_in_folder(SAMPLES) == []


@pytest.mark.parametrize("place", ["nothing", "m/config.pbtxt", "empty"])
def test_what_is_no_model_and_no_repository(model: Path, place: str) -> None:
    (model.parent / "empty").mkdir()
    ((trouble, found, name),) = [
        (each.trouble, each.found, each.model) for each in findings_in_folder(model.parent / place)
    ]
    assert (trouble, name) == (FolderTrouble.NOT_A_MODEL, "")
    assert found.startswith(str(model.parent / place))


def test_of_a_repository_each_model_is_examined(model: Path) -> None:
    shutil.copytree(model, model.parent / "n")
    (model.parent / "no model").mkdir()
    for name in "mn":
        (model.parent / name / "config.pbtxt").write_text(CONFIG.replace("direct", "driect"))
    found = [(finding.trouble, finding.model) for finding in findings_in_folder(model.parent)]
    assert found == [(ConfigTrouble.UNKNOWN_PATH, "m"), (ConfigTrouble.UNKNOWN_PATH, "n")]


@pytest.mark.parametrize(
    ("text", "place", "said"),
    [
        (CONFIG.replace("input [", "inputt ["), "3:1:", 'no field named "inputt". Did you mean input?'),
        (CONFIG.replace("TYPE_FP32", "TYPE_FLOAT"), "3:32:", "no value named TYPE_FLOAT"),
        ("\x00", "1:1:", ""),
    ],
)
def test_a_configuration_that_cannot_be_parsed_has_its_line_and_column(
    model: Path, text: str, place: str, said: str
) -> None:
    (model / "config.pbtxt").write_text(text)
    found = only(findings_in_folder(model), FolderTrouble.CONFIG_NOT_READ)
    assert found.startswith(f"{model / 'config.pbtxt'}:{place}")
    assert said in found


NAMELESS = "input [ { data_type: TYPE_FP32 dims: [ 1 ] optional: true } ]"


def write(file: Path, text: str | None) -> None:
    """Write a file of a model, or remove one that has no text."""
    if text is None:
        file.unlink()
    else:
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)


@pytest.mark.parametrize(
    ("file", "text", "trouble", "said"),
    [
        ("config.pbtxt", CONFIG.replace("optional: true", ""), ConfigTrouble.INPUTS_NOT_OPTIONAL, "X is not optional"),
        ("config.pbtxt", CONFIG.partition("parameters")[0], ConfigTrouble.NO_SHM_PATHS, "found no"),
        ("config.pbtxt", CONFIG + NAMELESS, FolderTrouble.BAD_TENSOR, "must specify 'name'"),
        ("config.pbtxt", CONFIG + 'name: "other"', FolderTrouble.OTHER_NAME, "has name 'other'; expected 'm'"),
        ("config.pbtxt", None, FolderTrouble.NO_CONFIG, "there is no"),
        ("2/other.py", "", FolderTrouble.NO_MODEL_CODE, "there is no {model}/2/model.py"),
        ("1/model.py", STOCK, ModelTrouble.NO_SESSION, "{model}/1/model.py: no ShmSession"),
        ("1/model.py", CODE.replace("Triton", ""), FolderTrouble.NO_MODEL_CLASS, "has no class TritonPythonModel"),
    ],
)
def test_one_file_that_is_wrong(model: Path, file: str, text: str | None, trouble: Trouble, said: str) -> None:
    write(model / file, text)
    assert said.format(model=model) in only(findings_in_folder(model), trouble)


def test_no_version(model: Path) -> None:
    shutil.rmtree(model / "1")
    assert "no folder whose name is a number" in only(findings_in_folder(model), FolderTrouble.NO_VERSION_FOLDER)


def test_a_configuration_that_the_code_completes_and_code_that_the_configuration_names(model: Path) -> None:
    write(model / "1/model.py", COMPLETING)
    write(model / "config.pbtxt", None)
    assert findings_in_folder(model) == []
    (model / "1/model.py").rename(model / "1/my.py")
    write(model / "config.pbtxt", CONFIG + 'default_model_filename: "my.py"')
    assert findings_in_folder(model) == []


OVERFLOWS = pytest.param(
    "a" + ".b" * 300_000,
    marks=pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10's own parser dies of it"),
)


@pytest.mark.parametrize(
    "code", ["def f(:\n", "x = 1\n  y = 2\n", "x = '\x00'\n", "(" * 100_000, "x=" + "-" * 200_000 + "1", OVERFLOWS]
)
def test_code_that_does_not_parse(model: Path, code: str) -> None:
    (model / "1" / "model.py").write_text(code)
    found = only(findings_in_folder(model), FolderTrouble.CODE_DOES_NOT_PARSE)
    assert re.match(f"{model / '1' / 'model.py'}:.*[^: ]$", found)


@pytest.mark.parametrize(
    "code",
    [
        "from .mine import TritonPythonModel",
        "import mine\nTritonPythonModel = mine.Model",
        "try:\n    from .mine import TritonPythonModel\nexcept ImportError:\n    raise",
    ],
)
def test_the_class_may_come_from_elsewhere(model: Path, code: str) -> None:
    (model / "1" / "model.py").write_text(code)
    (model / "1" / "mine.py").write_text(CODE)
    assert findings_in_folder(model) == []


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("    def execute(self, requests):\n        self.session.serve(requests, print)\n", "self.session.serve"),
        (
            "    async def execute(self, rs):\n        await self.session.serve_async(rs, 0)\n",
            "self.session.serve_async",
        ),
    ],
)
def test_answers_that_execute_drops(model: Path, code: str, name: str) -> None:
    file = model / "1" / "model.py"
    file.write_text(CODE + code)
    found = only(findings_in_folder(model), FolderTrouble.NOT_RETURNED)
    assert found == f"{file}:8: nothing is done with what {name} returns"


SERVING = f"{CODE}    def execute(self, rs):\n        return self.session.serve(rs, 0)\n"
STREAMING = f"{CODE}    def execute(self, rs):\n        self.session.serve_streams(rs, 0)\n"
DECOUPLED = f"{CONFIG}model_transaction_policy {{ decoupled: true }}\n"


@pytest.mark.parametrize(
    ("code", "config", "found"),
    [
        (STREAMING, CONFIG, "serve_streams is for decoupled models, and {config} does not call the model one"),
        (SERVING, DECOUPLED, "serve is for models that are not decoupled, and {config} calls the model decoupled"),
    ],
)
def test_a_call_of_another_mode(model: Path, code: str, config: str, found: str) -> None:
    file = model / "1" / "model.py"
    file.write_text(code)
    (model / "config.pbtxt").write_text(config)
    said = f"{file}: {found.format(config='config.pbtxt')}"
    assert only(findings_in_folder(model), FolderTrouble.OTHER_MODE) == said


@pytest.mark.parametrize(
    ("code", "config"),
    [
        (SERVING, CONFIG),
        (STREAMING, DECOUPLED),
        (STREAMING + "    def other(self, rs):\n        return self.session.serve(rs, 0)\n", CONFIG),
        (STREAMING + COMPLETING.removeprefix(CODE), CONFIG),
        (
            f"{CODE}    def execute(self, rs):\n        with torch.cuda.stream(0), self.session.open(rs[0]): pass\n",
            CONFIG,
        ),
    ],
    ids=[
        "its mode",
        "of streams",
        "a call of each mode",
        "a configuration that the code completes",
        "a stream of a GPU",
    ],
)
def test_a_call_of_its_mode_or_a_mode_that_the_syntax_does_not_tell(model: Path, code: str, config: str) -> None:
    (model / "1" / "model.py").write_text(code)
    (model / "config.pbtxt").write_text(config)
    assert findings_in_folder(model) == []


@pytest.mark.parametrize(
    "code", [STOCK, STOCK.replace(":", "(Base):", 1), "import nn\nclass Net(nn.Module): pass\n" + STOCK]
)
def test_an_ordinary_model_is_none_of_our_business_whatever_its_classes_are(model: Path, code: str) -> None:
    (model / "1" / "model.py").write_text(code)
    (model / "config.pbtxt").write_text(CONFIG.partition("parameters")[0].replace(" optional: true", ""))
    assert only(findings_in_folder(model), FolderTrouble.ORDINARY_MODEL)
    assert not FolderTrouble.ORDINARY_MODEL.is_fatal


INFER = (
    CODE
    + """
    def infer(self, call):
        LINE
"""
)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ('call.put("Z", 1)', "there is no output 'Z'; there are: Y"),
        ('call.output("y", (1,), float)', "there is no output 'y'; there are: Y; did you mean 'Y'?"),
        ('call.input("Y")', "there is no input 'Y'; there are: X"),
        ('call.forward("om", {})', "there is no model 'om'; there are: m, om_2"),
        ("with self.session.open(1) as one: one.put('Z', 1)", "there is no output 'Z'; there are: Y"),
    ],
)
def test_a_name_that_is_not_there(model: Path, line: str, found: str) -> None:
    shutil.copytree(model, model.parent / "om_2")
    (model / "1" / "model.py").write_text(INFER.replace("LINE", line))
    assert found in only(findings_in_folder(model.parent), FolderTrouble.UNKNOWN_NAME)


@pytest.mark.parametrize(
    "line",
    [
        *('call.put("Y", call.input("X"))', 'call.forward("om_2", {})', "call.put(name, 1)", 'self.queue.put("Z", 1)'),
        *('call.put("Z")', 'call.find_input("X").output("Z", 1, 2)', 'self.net.forward("om", 1)'),
    ],
)
def test_a_name_that_is_there_or_means_something_else(model: Path, line: str) -> None:
    shutil.copytree(model, model.parent / "om_2")
    (model / "1" / "model.py").write_text(INFER.replace("LINE", line))
    assert findings_in_folder(model.parent) == []


@pytest.mark.parametrize("place", ["mine.py", "1/mine.py", "1/mine/inner.py"])
def test_a_module_beside_it_may_have_the_session(model: Path, place: str) -> None:
    (model / "1" / "model.py").write_text(STOCK)
    (model / place).parent.mkdir(exist_ok=True)
    (model / place).write_text(CODE)
    (model / "1" / "broken.py").write_text("def f(:")  # which nobody imports
    assert findings_in_folder(model) == []


@pytest.mark.parametrize(
    "config", ['backend: "onnxruntime"', 'platform: "ensemble"', 'platform: "tensorflow_graphdef"']
)
def test_what_is_of_another_backend_is_passed_over(model: Path, config: str) -> None:
    (model / "config.pbtxt").write_text(config)
    shutil.rmtree(model / "1")
    assert findings_in_folder(model) == []


@pytest.mark.parametrize(
    ("file", "text", "found"),
    [
        ("__init__.py", '__version__: Final = "0.0.1"\nraise SystemExit', f"version 0.0.1 and protocol {VERSION}"),
        ("protocol/layout.py", "VERSION: Final = 1", f"version {__version__} and protocol 1"),
        ("protocol/layout.py", None, f"version {__version__} and protocol ?"),
    ],
)
def test_a_copy_that_is_not_of_this_release(model: Path, copy: Path, file: str, text: str | None, found: str) -> None:
    (copy / file).unlink() if text is None else (copy / file).write_text(text)
    expected = f"{copy} is of {found}, and this is {__version__} and {VERSION}"
    assert only(findings_in_folder(model), FolderTrouble.OTHER_COPY) == expected
    copy.rename(model / copy.name)
    assert only(findings_in_folder(model), FolderTrouble.OTHER_COPY) == expected.replace("/1/", "/")


@pytest.mark.parametrize("place", ["config.pbtxt", "model.py", "__init__.py"])
@pytest.mark.usefixtures("copy")
def test_what_this_user_may_not_read(model: Path, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a stand-in for the system's refusal, as tests may run as root."""

    really_open = os.open

    def refuse(path: str | Path, *arguments: int, **options: int) -> int:
        if Path(path).name == place:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return really_open(path, *arguments, **options)

    monkeypatch.setattr(os, "open", refuse)
    assert only(findings_in_folder(model), FolderTrouble.UNREADABLE).endswith(f"{place}: Permission denied")
