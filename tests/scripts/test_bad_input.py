"""What ``serve`` and ``demo`` say of what is wrong: a line, a status, and never a traceback."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from shm_backend_utils.cli import main
from shm_backend_utils.cli.common import server

OFFLINE = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}


def told(*arguments: str, cwd: Path, **environment: str) -> str:
    """Run a command that fails, and return what it says on standard error."""
    done = subprocess.run(
        [sys.executable, "-m", "shm_backend_utils", *arguments],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr.strip()


@pytest.mark.parametrize("command", ["serve", "demo"])
def test_a_server_that_cannot_be_fetched_is_told_with_what_was_tried(command: str, tmp_path: Path) -> None:
    server = str(tmp_path / "server")
    lines = told(command, cwd=tmp_path, SHM_BACKEND_UTILS_SERVER=server, **OFFLINE).splitlines()
    assert re.match(r"fetching the wheel nvidia-pytriton==0\.7\.0, which carries the server \(.* MB\)", lines[0])
    assert re.match(r"cannot fetch the wheel nvidia-pytriton==0\.7\.0, .*: ERROR: Could not find", lines[-1])
    assert len([line for line in lines if line]) == 2


def test_a_place_where_no_server_can_be_installed_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    words = told("serve", cwd=tmp_path, SHM_BACKEND_UTILS_SERVER=str(tmp_path / "file" / "server"))
    assert re.fullmatch("the server cannot be installed in .*/file/server: .* SHM_BACKEND_UTILS_SERVER", words)


def test_a_demo_without_a_server_says_what_to_do(tmp_path: Path) -> None:
    words = told("demo", "--url", "127.0.0.1:1", cwd=tmp_path)
    assert "no Triton server answers at grpc://127.0.0.1:1; is it running" in words


def test_models_that_are_not_there_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    for name in ("nowhere", "file", "loop"):
        words = told("serve", "--model-repository", name, cwd=tmp_path)
        models = "each is a folder NAME with config.pbtxt and 1/model.py"
        assert words == f"{name} is not a folder; expected a folder of models: {models}"
    (tmp_path / "mine" / "1").mkdir(parents=True)
    (tmp_path / "mine" / "1" / "model.py").touch()
    words = told("serve", "--model-repository", "mine", cwd=tmp_path)
    assert words == f"mine is a model's folder; give its parent folder instead: {tmp_path}"


@pytest.mark.parametrize("protocol", ["grpc", "http", "metrics"])
def test_a_port_that_is_taken_is_named_before_a_model_is_loaded(tmp_path: Path, protocol: str) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        number = other.getsockname()[1]
        (tmp_path / "models").mkdir()
        words = told("serve", "--model-repository", "models", f"--{protocol}-port", str(number), cwd=tmp_path)
    assert words.splitlines() == [
        "models has no models; each is a folder NAME with config.pbtxt and 1/model.py",
        f"port {number} is already in use; choose another one with --{protocol}-port",
    ]


@pytest.mark.parametrize("number", ["0", "-4", "65536", "99999", "x"])
def test_what_is_no_port_is_refused(number: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["serve", f"--http-port={number}"])
    assert end.value.code == 2
    assert "argument --http-port: " in capsys.readouterr().err


@pytest.mark.parametrize("picture", ["nowhere/demo.png", "."])
def test_a_picture_that_cannot_be_written_is_told_before_anything_is_measured(
    picture: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["demo", "--url", "127.0.0.1:1", "--picture", picture]) == 1
    expected = f"cannot write the picture to {Path(picture)}; choose another file with --picture FILE\n"
    assert capsys.readouterr() == ("", expected)


@pytest.mark.parametrize("missing", ["rich", "matplotlib", "skimage"])
def test_a_package_that_is_missing_is_named_with_the_extra_that_has_it(
    missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.startswith(("shm_backend_utils.cli.demo", f"{missing}."))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(SystemExit, match="0"):
        main(["demo", "--help"])
    assert "--picture FILE" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="1"):
        main(["demo"])
    told = f"shm-backend-utils demo needs {missing}, which is not installed: "
    assert capsys.readouterr() == ("", f"{told}pip install 'CHECKOUT_OR_WHEEL[demo]'\n")


def test_a_sample_without_package_is_left(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(server, "_PACKAGES", {"identity": "nothing_of_this_name"})
    names = {model.name for model in server.sample_models()}
    assert "multiply" in names
    assert "identity" not in names
    assert capsys.readouterr().err == "the model identity is left out, as nothing_of_this_name is not installed\n"
