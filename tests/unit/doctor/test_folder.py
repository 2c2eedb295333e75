"""A model's folder without a server: each thing is broken in it, and found; whatever it holds, nothing of it runs."""

from __future__ import annotations

import errno
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

import shm_backend_utils
from shm_backend_utils import __version__
from shm_backend_utils.cli.doctor import as_text
from shm_backend_utils.cli.doctor.checkup import Checkup, Finding
from shm_backend_utils.cli.doctor.folder_checks import findings_in_folder
from shm_backend_utils.cli.doctor.troubles import Trouble
from shm_backend_utils.protocol.layout import VERSION
from tests.unit.harness.folders import folder_of
from tests.unit.test_source_files import device, huge, pipe

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
COMPLETING = f"{CODE}\n    @staticmethod\n    def auto_complete_config(config):\n        return config\n"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return folder_of(tmp_path, CODE, CONFIG)


@pytest.fixture
def copy(model: Path) -> Path:
    """A copy of this library in it, as far as it is looked at."""
    copy = model / "1" / "shm_backend_utils"
    for name in ("__init__.py", "protocol/layout.py"):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(PACKAGE / name, copy / name)
    return copy


Files = Mapping[str, str | None]


def write(model: Path, files: Files) -> None:
    for name, text in files.items():
        file = model / name
        if text is None:
            file.unlink()
        else:
            file.parent.mkdir(exist_ok=True)
            file.write_text(text)


def only(findings: list[Finding], trouble: Trouble) -> str:
    assert [(finding.trouble.code, finding.model) for finding in findings] == [(trouble.code, "m")]
    assert "\n" not in findings[0].found
    assert not findings[0].found.endswith((":", " "))
    return findings[0].found


@pytest.mark.usefixtures("copy")
def test_nothing_is_wrong_with_a_fine_one_that_has_a_copy_nor_with_any_of_our_samples(model: Path) -> None:
    assert findings_in_folder(model) == findings_in_folder(SAMPLES) == []


@pytest.mark.parametrize("place", ["nothing", "m/config.pbtxt", "empty"])
def test_what_is_no_model_and_no_repository(model: Path, place: str) -> None:
    (model.parent / "empty").mkdir()
    (finding,) = findings_in_folder(model.parent / place)
    assert (finding.trouble, finding.model) == (Trouble.NOT_A_MODEL, "")
    assert finding.found.startswith(str(model.parent / place))


def test_of_a_repository_each_model_is_examined(model: Path) -> None:
    shutil.copytree(model, model.parent / "n")
    (model.parent / "no model").mkdir()
    for name in "mn":
        (model.parent / name / "config.pbtxt").write_text(CONFIG.replace("direct", "driect"))
    found = [(finding.trouble, finding.model) for finding in findings_in_folder(model.parent)]
    assert found == [(Trouble.UNKNOWN_PATH, "m"), (Trouble.UNKNOWN_PATH, "n")]


SERVING = f"{CODE}    def execute(self, rs):\n        return self.session.serve(rs, 0)\n"
STREAMING = f"{CODE}    def execute(self, rs):\n        self.session.serve_streams(rs, 0)\n"
DECOUPLED = f"{CONFIG}model_transaction_policy {{ decoupled: true }}\n"
NAMELESS = "input [ { data_type: TYPE_FP32 dims: [ 1 ] optional: true } ]"
PLAIN = CONFIG.partition("parameters")[0]


def inferring(line: str) -> dict[str, str]:
    return {"1/model.py": f"{CODE}\n    def infer(self, call):\n        {line}\n"}


def configured(text: str) -> dict[str, str]:
    return {"config.pbtxt": text}


def coded(text: str, config: str = CONFIG) -> dict[str, str]:
    return {"1/model.py": text, "config.pbtxt": config}


UNPARSED = [
    *("def f(:\n", "x = 1\n  y = 2\n", "x = '\x00'\n", "(" * 100_000, "x=" + "-" * 200_000 + "1"),
    *(["a" + ".b" * 300_000] if sys.version_info >= (3, 11) else []),  # Python 3.10's own parser dies of it
]
WRONG: list[tuple[Files, Trouble, str]] = [
    *(
        (configured(text), Trouble.CONFIG_NOT_READ, said)
        for text, said in (
            (CONFIG.replace("input [", "inputt ["), "{model}/config.pbtxt:3:1:"),
            (CONFIG.replace("input [", "inputt ["), 'no field named "inputt". Did you mean input?'),
            (CONFIG.replace("TYPE_FP32", "TYPE_FLOAT"), "{model}/config.pbtxt:3:32:"),
            (CONFIG.replace("TYPE_FP32", "TYPE_FLOAT"), "no value named TYPE_FLOAT"),
            ("\x00", "{model}/config.pbtxt:1:1:"),
        )
    ),
    (configured(CONFIG.replace("optional: true", "")), Trouble.INPUTS_NOT_OPTIONAL, "X is not optional"),
    (configured(PLAIN), Trouble.NO_SHM_PATHS, "found no"),
    (configured(CONFIG + NAMELESS), Trouble.BAD_TENSOR, "must specify 'name'"),
    (configured(CONFIG + 'name: "other"'), Trouble.OTHER_NAME, "has name 'other'; expected 'm'"),
    ({"config.pbtxt": None}, Trouble.NO_CONFIG, "there is no"),
    ({"2/other.py": ""}, Trouble.NO_MODEL_CODE, "there is no {model}/2/model.py"),
    (coded(STOCK), Trouble.NO_SESSION, "{model}/1/model.py: no ShmSession"),
    (coded(CODE.replace("Triton", "")), Trouble.NO_MODEL_CLASS, "has no class TritonPythonModel"),
    *((coded(code), Trouble.CODE_DOES_NOT_PARSE, "{model}/1/model.py:") for code in UNPARSED),
    *(
        (
            coded(f"{CODE}    {line}\n"),
            Trouble.NOT_RETURNED,
            f"{{model}}/1/model.py:8: the result of {name} is not returned",
        )
        for line, name in (
            ("def execute(self, rs):\n        self.session.serve(rs, print)", "self.session.serve"),
            ("async def execute(self, rs):\n        await self.session.serve_async(rs, 0)", "self.session.serve_async"),
        )
    ),
    (
        coded(STREAMING),
        Trouble.OTHER_MODE,
        "{model}/1/model.py: serve_streams is for decoupled models, but config.pbtxt does not set decoupled: true",
    ),
    (
        coded(SERVING, DECOUPLED),
        Trouble.OTHER_MODE,
        "{model}/1/model.py: serve is for models that are not decoupled, but config.pbtxt sets decoupled: true",
    ),
    *(
        (coded(code, PLAIN.replace(" optional: true", "")), Trouble.ORDINARY_MODEL, "")
        for code in (*(STOCK, STOCK.replace(":", "(Base):", 1)), "import nn\nclass Net(nn.Module): pass\n" + STOCK)
    ),
    *(
        (inferring(line), Trouble.UNKNOWN_NAME, found)
        for line, found in (
            ('call.put("Z", 1)', "there is no output 'Z'; there are: Y"),
            ('call.output("y", (1,), float)', "there is no output 'y'; there are: Y; did you mean 'Y'?"),
            ('call.input("Y")', "there is no input 'Y'; there are: X"),
            ("with self.session.open(1) as one: one.put('Z', 1)", "there is no output 'Z'; there are: Y"),
        )
    ),
]


@pytest.mark.parametrize(("files", "trouble", "said"), WRONG, ids=[trouble.code for _, trouble, _ in WRONG])
def test_what_is_wrong_is_found(model: Path, files: Files, trouble: Trouble, said: str) -> None:
    write(model, files)
    assert said.format(model=model) in only(findings_in_folder(model), trouble)


def test_a_model_that_is_called_is_looked_for_beside_it(model: Path) -> None:
    shutil.copytree(model, model.parent / "om_2")
    write(model, inferring('call.forward("om", {})'))
    found = only(findings_in_folder(model.parent), Trouble.UNKNOWN_NAME)
    assert "there is no model 'om'; there are: m, om_2" in found
    write(model, inferring('call.forward("om_2", {})'))
    assert findings_in_folder(model.parent) == []


def test_no_version(model: Path) -> None:
    shutil.rmtree(model / "1")
    assert "no folder whose name is a number" in only(findings_in_folder(model), Trouble.NO_VERSION_FOLDER)
    for other in ('backend: "onnxruntime"', 'platform: "ensemble"', 'platform: "tensorflow_graphdef"'):
        write(model, configured(other))
        assert findings_in_folder(model) == [], "what is of another backend is passed over"


FINE: list[Files] = [
    {"1/model.py": COMPLETING, "config.pbtxt": None},
    {"1/model.py": None, "1/my.py": CODE, "config.pbtxt": CONFIG + 'default_model_filename: "my.py"'},
    *(
        {"1/model.py": code, "1/mine.py": CODE}
        for code in (
            "from .mine import TritonPythonModel",
            "import mine\nTritonPythonModel = mine.Model",
            "try:\n    from .mine import TritonPythonModel\nexcept ImportError:\n    raise",
        )
    ),
    *(  # a session in a module beside it; and one that nobody imports
        {"1/model.py": STOCK, place: CODE, "1/broken.py": "def f(:"}
        for place in ("mine.py", "1/mine.py", "1/mine/inner.py")
    ),
    coded(SERVING),
    coded(STREAMING, DECOUPLED),
    coded(STREAMING + "    def other(self, rs):\n        return self.session.serve(rs, 0)\n"),
    coded(STREAMING + COMPLETING.removeprefix(CODE)),
    coded(f"{CODE}    def execute(self, rs):\n        with torch.cuda.stream(0), self.session.open(rs[0]): pass\n"),
    *map(
        inferring,
        (
            *('call.put("Y", call.input("X"))', "call.put(name, 1)", 'self.queue.put("Z", 1)', 'call.put("Z")'),
            *('call.find_input("X").output("Z", 1, 2)', 'self.net.forward("om", 1)'),
        ),
    ),
]


@pytest.mark.parametrize("files", FINE)
def test_what_is_fine_or_cannot_be_told_is_not_found(model: Path, files: Files) -> None:
    write(model, files)
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
    expected = f"{copy} has {found}; expected {__version__} and {VERSION}"
    assert only(findings_in_folder(model), Trouble.OTHER_COPY) == expected
    copy.rename(model / copy.name)
    assert only(findings_in_folder(model), Trouble.OTHER_COPY) == expected.replace("/1/", "/")


@pytest.mark.parametrize("place", ["config.pbtxt", "model.py", "__init__.py"])
@pytest.mark.usefixtures("copy")
def test_what_this_user_may_not_read(model: Path, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    really_open = os.open  # tests may run as root, whom the system refuses nothing

    def refuse(path: str | Path, *arguments: int, **options: int) -> int:
        if Path(path).name == place:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return really_open(path, *arguments, **options)

    monkeypatch.setattr(os, "open", refuse)
    assert only(findings_in_folder(model), Trouble.UNREADABLE).endswith(f"{place}: Permission denied")


def codes(folder: Path) -> set[str]:
    return {finding.trouble.code for finding in findings_in_folder(folder)}


@pytest.mark.parametrize("make", [pipe, device, huge, Path.mkdir], ids=lambda make: make.__name__)
def test_what_is_no_file_is_not_read(make: Callable[[Path], None], model: Path) -> None:
    make(model / "1" / "helper.py")
    assert codes(model) == set()
    for name in ("1/model.py", "config.pbtxt"):
        (model / name).unlink()
        make(model / name)
        assert codes(model) & {"unreadable", "no-model-code"}


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


LONG = [
    "[" * 100_000,
    "input { " * 5000,
    f'parameters {{ key: "SHM_ALLOWED_UIDS" value {{ string_value: "{"9" * 5000}" }} }}',
    f'default_model_filename: "{"x" * 5000}"',
]


@pytest.mark.parametrize("line", LONG, ids=["brackets", "deep", "a long number", "a long name"])
def test_a_configuration_that_no_parser_likes(line: str, model: Path) -> None:
    with (model / "config.pbtxt").open("a") as file:
        file.write(line)
    checkup = Checkup()
    checkup.conclude(findings_in_folder(model), "nothing")
    assert checkup.exit_status == 1
    assert len(as_text(checkup)) < 10_000
