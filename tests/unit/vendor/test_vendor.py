"""The command: what it makes, what it finds in a copy, what it leaves alone, and what it says."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from shm_backend_utils import __version__
from shm_backend_utils.cli import main
from shm_backend_utils.cli.vendor import placing
from shm_backend_utils.cli.vendored_copy import MANIFEST

NAME = "shm_backend_utils"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model's folder."""
    folder = tmp_path / "m"
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").touch()
    (folder / "config.pbtxt").touch()
    return folder


@pytest.fixture(scope="module")
def whole_copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy that is made once."""
    folder = tmp_path_factory.mktemp("vendored")
    folder.chmod(0o755)  # which the copy takes over
    (folder / "config.pbtxt").touch()
    assert main(["vendor", str(folder)]) == 0
    return folder / NAME


@pytest.fixture
def copy(model: Path, whole_copy: Path) -> Path:
    """A copy in the model's folder."""
    return Path(shutil.copytree(whole_copy, model / NAME))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def said(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 1) -> str:
    """Return the one line that the command says, on the right stream."""
    assert main(["vendor", *arguments]) == status
    out, err = capsys.readouterr()
    assert (out if status else err) == ""
    lines = (err if status else out).splitlines()
    assert len(lines) == 1
    return lines[0]


def test_a_copy_is_made(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, str(model), status=0) == f"{model / NAME}: made, version {__version__}"


def test_a_copy_is_whole(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = said(capsys, "--check", str(copy.parent), status=0)
    assert line == f"{copy}: complete and unmodified, version {__version__}"


def test_what_python_compiles_in_it_does_not_count(copy: Path) -> None:
    (copy / "model" / "__pycache__").mkdir()
    (copy / "model" / "__pycache__" / "session.cpython-311.pyc").touch()
    assert main(["vendor", "--check", str(copy.parent)]) == 0


def test_where_there_is_none_the_check_says_so(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "--check", str(model)) == f"there is no {model / NAME}; run vendor without --check"


def test_a_missing_file_is_found_and_brought_back(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (copy / "errors.py").unlink()
    assert f"{copy} lacks errors.py; " in said(capsys, "--check", str(copy.parent))
    shutil.rmtree(copy / "memory")
    assert "lacks errors.py and " in said(capsys, "--check", str(copy.parent))
    assert main(["vendor", str(copy.parent)]) == 0
    assert main(["vendor", "--check", str(copy.parent)]) == 0


def test_a_modified_file_is_found_and_replaced(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(copy)
    (copy / "model" / "session.py").write_text("mine = 1")
    assert "other contents than it was made with in model/session.py; " in said(capsys, "--check", str(copy.parent))
    assert main(["vendor", str(copy.parent)]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{copy}: replaced, version {__version__}\n  before: ")
    assert contents(copy) == before


def test_a_copy_of_another_version_is_found_and_replaced(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = json.loads((copy / MANIFEST).read_text())
    (copy / MANIFEST).write_text(json.dumps({**manifest, "version": "0.0.1"}))
    assert said(capsys, "--check", str(copy.parent)).startswith(
        f"{copy} is of version 0.0.1, and this is {__version__}; run vendor without --check"
    )
    assert main(["vendor", str(copy.parent)]) == 0
    assert main(["vendor", "--check", str(copy.parent)]) == 0


@pytest.mark.parametrize("kind", ["file", "link to a file", "link to a folder", "pipe"])
def test_what_was_added_is_found_and_not_lost(copy: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    added = copy / "model" / "mine.py"
    if kind == "file":
        added.touch()
    elif kind == "pipe":
        os.mkfifo(added)
    else:
        added.symlink_to(copy / ("errors.py" if kind == "link to a file" else "memory"))
    for arguments in (["--check"], []):
        line = said(capsys, *arguments, str(copy.parent))
        assert "has what it was not made with: model/mine.py; " in line
        assert line.endswith("move it away, and run vendor again")
    assert os.path.lexists(added)


MANIFESTS = {
    "none": None,
    "of something else": json.dumps({"distribution": "other", "version": "1", "files": {}}),
    "cut off": '{"distribution": "triton-shm-backend-utils", "ver',
    "no files": json.dumps({"distribution": "triton-shm-backend-utils", "version": "1"}),
    "a list": "[1]",
    "no text": "\udcff",
    "deep": "[" * 100_000,
}


@pytest.mark.parametrize("what", MANIFESTS)
def test_a_folder_that_is_not_ours_is_left_alone(model: Path, what: str, capsys: pytest.CaptureFixture[str]) -> None:
    copy = model / NAME
    copy.mkdir()
    (copy / "__init__.py").write_text("theirs")
    manifest = MANIFESTS[what]
    if manifest is not None:
        (copy / MANIFEST).write_bytes(manifest.encode(errors="surrogateescape"))
    before = contents(model)
    for arguments in (["--check"], []):
        assert "was not made by vendor; " in said(capsys, *arguments, str(model))
    assert contents(model) == before


@pytest.mark.parametrize("kind", ["file", "link", "dangling link"])
def test_nor_is_a_file_or_a_link_of_that_name(
    model: Path, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    (other / "1").mkdir(parents=True)
    (other / "1" / "model.py").touch()
    assert main(["vendor", str(other)]) == 0
    capsys.readouterr()
    if kind == "file":
        (model / NAME).touch()
    else:
        (model / NAME).symlink_to(other / (NAME if kind == "link" else "nothing"))
    assert "was not made by vendor; it is left as it is" in said(capsys, str(model))


def test_a_copy_that_was_broken_off_is_found_and_cleared(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Killed in its middle, when nothing can be cleaned up."""
    program = (
        "import os, sys; from shm_backend_utils.cli import main; from shm_backend_utils.cli.vendor import placing;"
        "placing._swap = lambda *_: os._exit(9); main(['vendor', sys.argv[1]])"
    )
    assert subprocess.run([sys.executable, "-c", program, str(model)], check=False).returncode == 9
    assert not (model / NAME).exists()
    assert main(["vendor", "--check", str(model)]) == 1
    assert "is of a copy that was broken off; run vendor without --check" in capsys.readouterr().err
    assert main(["vendor", str(model)]) == 0
    assert sorted(path.name for path in model.iterdir()) == ["1", "config.pbtxt", NAME]


FULL = """
import resource, sys
from shm_backend_utils.cli import main
resource.setrlimit(resource.RLIMIT_FSIZE, (16384, 16384))
sys.exit(main(["vendor", sys.argv[1]]))
"""


@pytest.mark.parametrize("has_copy", [False, True])
def test_what_cannot_be_written_is_one_line_and_leaves_all_as_it_was(
    model: Path, has_copy: bool, whole_copy: Path
) -> None:
    """In the middle of a file, as on a full disk; here the system lets no file be longer than 16 KiB."""
    if has_copy:
        shutil.copytree(whole_copy, model / NAME)
    before = contents(model)
    done = subprocess.run([sys.executable, "-c", FULL, str(model)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"{model}: File too large\n")
    assert contents(model) == before
    assert len(list(model.iterdir())) == 2 + has_copy


@pytest.mark.parametrize("has_exchange", [True, False])
def test_it_is_replaced_also_where_folders_cannot_change_places(
    copy: Path, has_exchange: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_exchange:
        monkeypatch.setattr(placing, "_exchanged", lambda *_: False)
    before = copy.stat().st_ino
    assert main(["vendor", str(copy.parent)]) == 0
    assert copy.stat().st_ino != before
    assert sorted(path.name for path in copy.parent.iterdir()) == ["1", "config.pbtxt", NAME]


def test_folders_change_places_in_one_step(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    if not placing._exchanged(tmp_path / "a", tmp_path / "b"):
        pytest.skip("this file system cannot do that")
    assert (tmp_path / "a" / "b").exists()
    assert (tmp_path / "b" / "a").exists()


def test_the_old_copy_comes_back_where_the_new_one_cannot_take_its_place(
    copy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = Path.rename

    def rename(path: Path, place: Path) -> Path:
        if path.name == NAME and place == copy:
            raise OSError(errno.EACCES, os.strerror(errno.EACCES), str(place))
        return real(path, place)

    monkeypatch.setattr(placing, "_exchanged", lambda *_: False)
    monkeypatch.setattr(Path, "rename", rename)
    assert "Permission denied" in said(capsys, str(copy.parent))
    assert main(["vendor", "--check", str(copy.parent)]) == 0


def test_only_one_at_a_time(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    handle = os.open(model, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        assert f"another process is putting a copy into {model}; wait" in said(capsys, str(model))
    finally:
        os.close(handle)


def test_who_may_read_the_models_folder_may_read_the_copy(model: Path) -> None:
    model.chmod(0o750)
    before = os.umask(0o077)
    try:
        assert main(["vendor", str(model)]) == 0
    finally:
        os.umask(before)
    found = {stat.S_IMODE(path.stat().st_mode) for path in (model / NAME).rglob("*") if path.is_dir()}
    assert found == {stat.S_IMODE((model / NAME).stat().st_mode)} == {0o750}
    assert {stat.S_IMODE(path.stat().st_mode) for path in (model / NAME).rglob("*") if path.is_file()} == {0o640}


def test_without_permission_it_is_one_line(model: Path) -> None:
    """As a user who may read the folder; all modules are there before, as this Python may be root's alone."""
    program = (
        "import os, sys\nfrom shm_backend_utils.cli import main\n"
        "main(['vendor', '.'])\n"
        "os.chmod('.', 0o555)\n"
        "if os.geteuid() == 0: os.setegid(65534); os.seteuid(65534)\n"
        "sys.exit(main(['vendor', '.']))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=model, capture_output=True, text=True, check=False)
    model.chmod(0o755)
    assert (done.returncode, done.stdout) == (1, f"{NAME}: made, version {__version__}\n")
    assert done.stderr.count("\n") == 1
    assert done.stderr.endswith(": Permission denied\n")


def test_a_copy_that_cannot_be_read_is_one_line(
    copy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(path: Path, *_: int) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(os, "open", refuse)
    assert said(capsys, "--check", str(copy.parent)) == f"{copy / MANIFEST}: Permission denied"


@pytest.mark.parametrize(
    ("folder", "line"),
    [
        ("nothing", "nothing is not there; expected a model's folder, with config.pbtxt or 1/model.py"),
        ("m/config.pbtxt", "m/config.pbtxt is no folder; expected a model's folder, with config.pbtxt or 1/model.py"),
        ("m/1", "m/1 is the folder of a version; give that of the model, {}/m"),
        (".", ". is a repository of models; give one of them: m"),
        ("empty", "empty is no model's folder; expected a model's folder, with config.pbtxt or 1/model.py"),
        ("odd\x1b[31m", r"odd\x1b[31m is not there; expected a model's folder, with config.pbtxt or 1/model.py"),
    ],
)
def test_what_is_no_models_folder_is_one_line(
    model: Path, folder: str, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(model.parent)
    Path("empty").mkdir()
    for arguments in (["--check"], []):
        assert said(capsys, *arguments, folder) == line.format(model.parent)


@pytest.mark.parametrize("file", ["config.pbtxt", "1/model.py"])
def test_either_file_makes_a_models_folder(model: Path, file: str) -> None:
    (model / file).unlink()
    assert main(["vendor", str(model)]) == 0


@pytest.mark.parametrize("is_installed", [True, False])
def test_the_licence_is_that_of_the_installation_or_of_the_checkout(
    is_installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: str) -> None:
        raise metadata.PackageNotFoundError

    if is_installed:
        (tmp_path / "LICENSE").write_text("of another package")
        monkeypatch.setattr(placing, "_PACKAGE_FOLDER", tmp_path / NAME)
    else:
        monkeypatch.setattr(metadata, "files", fail)
    assert "Apache License" in placing._licence()


def test_without_a_licence_there_is_no_copy(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(placing, "_LICENCE", "NOTHING")
    monkeypatch.setattr(metadata, "files", lambda _: None)
    assert "lacks its NOTHING" in said(capsys, str(model))
    assert not (model / NAME).exists()


def test_it_needs_nothing_but_the_standard_library_and_numpy(model: Path) -> None:
    """Beside a server, where there may be nothing else."""
    program = (
        "import sys, numpy; before = set(sys.modules); from shm_backend_utils.cli import main;"
        "assert main(['vendor', sys.argv[1]]) == 0;"
        "print(*{name.partition('.')[0] for name in set(sys.modules) - before} - sys.stdlib_module_names)"
    )
    command = [sys.executable, "-c", program, str(model)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[1:] == [NAME]


def test_a_link_in_place_of_a_file_is_found(copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outside = tmp_path / "errors.py"
    (copy / "errors.py").rename(outside)
    (copy / "errors.py").symlink_to(outside)
    assert "in errors.py; " in said(capsys, "--check", str(copy.parent))


def test_not_everybody_may_write_to_the_copy(model: Path) -> None:
    model.chmod(0o1777)
    assert main(["vendor", str(model)]) == 0
    for place in (model / NAME, *(model / NAME).rglob("*")):
        assert not place.stat().st_mode & stat.S_IWOTH


def test_what_comes_while_another_one_is_at_it_is_not_lost(
    copy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    really_lock = fcntl.flock

    def lock(handle: int, how: int) -> None:
        really_lock(handle, how)
        (copy / "mine.py").touch()

    monkeypatch.setattr(fcntl, "flock", lock)
    assert "that would be lost" in said(capsys, str(copy.parent))
    assert (copy / "mine.py").exists()


def test_an_interruption_between_the_two_steps_brings_the_old_copy_back(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really_rename = Path.rename

    def rename(path: Path, target: Path) -> Path:
        moved = really_rename(path, target)
        if target.name == "old":
            raise KeyboardInterrupt
        return moved

    monkeypatch.setattr(placing, "_exchanged", lambda *_: False)
    monkeypatch.setattr(Path, "rename", rename)
    assert main(["vendor", str(copy.parent)]) == 130
    assert main(["vendor", "--check", str(copy.parent)]) == 0


@pytest.mark.skipif(sys.version_info < (3, 11), reason="-m of Python 3.10 takes packages from its folder in any case")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_nothing_behind(number: signal.Signals, copy: Path) -> None:
    before = contents(copy.parent)
    code = """if True:
        import sys, time
        from shm_backend_utils.cli import main
        from shm_backend_utils.cli.vendor import placing
        def wait(*_):
            print("made", flush=True)
            time.sleep(60)
        placing._swap = wait
        sys.exit(main(["vendor", sys.argv[1]]))
    """
    words = [sys.executable, "-c", code, str(copy.parent)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "made\n"
        process.send_signal(number)
        _, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (128 + number, "")
    assert contents(copy.parent) == before
    assert list(copy.parent.glob(".*")) == []


def test_a_hostile_copy_is_not_run(copy: Path, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    for file in copy.rglob("*.py"):
        with file.open("a") as opened:
            opened.write(f"\nopen({str(mark)!r}, 'w')\n")
    words = [sys.executable, "-m", NAME, "vendor", "--check", "."]
    done = subprocess.run(
        words, cwd=copy.parent, env={**os.environ, "PYTHONSAFEPATH": "1"}, capture_output=True, check=False
    )
    assert done.returncode == 1
    assert not mark.exists()
