"""``shm-backend-utils vendor``: what may be asked for, and what is said."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ... import __version__
from ...errors import MachineError
from ...repository.layout import CODE_FILE, CONFIG_FILE, is_model_folder, model_folders
from ..vendored_copy import PACKAGE, Flaw, flaws
from ..wording import printable
from .placing import AGAIN, place_copy

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.add_argument(
        "folder", type=Path, metavar="MODEL_DIR", help="the model's folder, with config.pbtxt or 1/model.py"
    )
    parser.add_argument("--check", action="store_true", help="change nothing; tell whether the copy there is whole")


def run(arguments: argparse.Namespace) -> int:
    """Put the copy there, or look at it; return the exit status."""
    try:
        model = _model_folder(arguments.folder)
        return _tell(model, flaws(model)) if arguments.check else _replace(model)
    except MachineError as error:
        reason = str(error)
    except OSError as error:
        place = error.filename or arguments.folder
        reason = f"{place}: {error.strerror or error}"
    except SyntaxError as error:
        reason = f"{error.filename}: {error.msg}; this installation is damaged: install it again"
    print(printable(reason), file=sys.stderr)
    return 1


def _replace(model: Path) -> int:
    found = place_copy(model)
    is_new = any(flaw.kind == "absent" for flaw in found)
    print(printable(f"{model / PACKAGE}: {'made' if is_new else 'replaced'}, version {__version__}"))
    for flaw in found:
        if flaw.kind != "absent":
            print(printable(f"  before: {flaw.text}"))
    return 0


def _tell(model: Path, found: list[Flaw]) -> int:
    for flaw in found:
        remedy = f"move it away, and {AGAIN}" if flaw.kind in ("foreign", "added") else "run vendor without --check"
        print(printable(f"{flaw.text}; {remedy}"), file=sys.stderr)
    if found:
        return 1
    print(printable(f"{model / PACKAGE}: complete and unmodified, version {__version__}"))
    return 0


def _model_folder(folder: Path) -> Path:
    """Return a folder that has what Triton takes for a model.

    Raises
    ------
    MachineError
        It is none; the message says what would be one.
    """
    if not folder.is_dir():
        raise MachineError(f"{folder} is {'no folder' if folder.exists() else 'not there'}; expected {_expected()}")
    if is_model_folder(folder):
        return folder
    if (folder / CODE_FILE).is_file():
        raise MachineError(f"{folder} is the folder of a version; give that of the model, {folder.absolute().parent}")
    models = ", ".join(model.name for model in model_folders(folder))
    if models:
        raise MachineError(f"{folder} is a repository of models; give one of them: {models}")
    raise MachineError(f"{folder} is no model's folder; expected {_expected()}")


def _expected() -> str:
    return f"a model's folder, with {CONFIG_FILE} or 1/{CODE_FILE}"
