"""A signal that comes while a command cleans up ends it when that is done."""

from __future__ import annotations

import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scripts.tools.release import __main__ as release
from scripts.tools.release.build import BuildError
from shm_backend_utils.cli.common import server
from shm_backend_utils.cli.signals import ENDING, Interrupted, raise_on_signals, undisturbed
from shm_backend_utils.errors import MachineError


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """Have signals raise, as they do in a command."""
    before = {number: signal.getsignal(number) for number in ENDING}
    raise_on_signals()
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def removed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The folders that are removed, before which a signal comes each time."""
    folders: list[str] = []
    really_remove = shutil.rmtree

    def remove(folder: Any, *given: Any, **named: Any) -> None:
        if not folders:
            signal.raise_signal(signal.SIGTERM)
        folders.append(str(folder))
        really_remove(folder, *given, **named)

    monkeypatch.setattr(shutil, "rmtree", remove)
    return folders


@pytest.mark.parametrize("number", ENDING)
def test_what_is_cleaned_up_is_cleaned_up_first(number: signal.Signals) -> None:
    done = []

    def clean() -> None:
        with undisturbed():
            signal.raise_signal(number)
            done.append(number)

    with pytest.raises(Interrupted) as caught:
        clean()
    assert (done, caught.value.number) == ([number], number)


def test_without_a_signal_nothing_comes_of_it() -> None:
    handlers = [signal.getsignal(number) for number in ENDING]
    with undisturbed():
        pass
    assert [signal.getsignal(number) for number in ENDING] == handlers


def test_another_thread_is_never_disturbed() -> None:
    done = []

    def clean() -> None:
        with undisturbed():
            done.append("clean")

    thread = threading.Thread(target=clean)
    thread.start()
    thread.join()
    assert done == ["clean"]


def test_what_has_a_server_for_a_while_removes_its_folder_all_the_same(
    tmp_path: Path, removed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def fail(_: Path) -> Path:
        raise MachineError("there are no models")

    with pytest.raises(Interrupted), server.temporary_server("test", fail):
        pass
    assert len(removed) == 1
    assert list(tmp_path.iterdir()) == []


def test_and_so_does_a_release(tmp_path: Path, removed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))

    def fail(*_: Any) -> Any:
        raise BuildError("nothing is built")

    monkeypatch.setattr(release, "export", fail)
    with pytest.raises(Interrupted):
        release.release(tmp_path, tmp_path / "dist")
    assert len(removed) == 1
    assert list((tmp_path / "temporary").iterdir()) == []
