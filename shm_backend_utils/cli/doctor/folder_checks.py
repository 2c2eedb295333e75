"""What is wrong in a model's folder, without a server: its configuration, its code, and copies of this library."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Final

from google.protobuf import json_format

from ... import __version__
from ...errors import ModelError, names_told
from ...model_spec import is_of_python_backend
from ...protocol.layout import VERSION
from ...repository.config import check_tensors, read_config
from ...repository.layout import CODE_FILE, CONFIG_FILE, version_folders
from ...repository.source_files import NoSourceError, read_source
from .config_checks import findings_in_config, mentions_shared_memory
from .findings import Finding
from .model_code import ANSWERING, MODEL_CLASS, PACKAGE, STREAMING, ModelCode
from .troubles import folder as troubles
from .troubles.config import NO_SHM_INPUT, NO_SHM_PATHS
from .troubles.model import NO_SESSION

__all__ = ["findings_in_folder"]

_LIBRARY_VERSION: Final = "__init__.py", re.compile(rb'^__version__\b.*= "([^"\n]+)"', re.MULTILINE)
_PROTOCOL_VERSION: Final = "protocol/layout.py", re.compile(rb"^VERSION\b.*= (\d+)", re.MULTILINE)


def findings_in_folder(folder: Path) -> list[Finding]:
    """Return what is wrong in a model's folder, or in each of a repository; nothing for models of other backends."""
    try:
        folder = folder.absolute()
        if not folder.is_dir():
            found = "is no folder" if folder.exists() else "is not there"
            return [Finding(troubles.NOT_A_MODEL, f"{folder} {found}")]
        if _is_model(folder):
            return _findings_in_model(folder)
        models = [each for each in sorted(folder.iterdir()) if each.is_dir() and _is_model(each)]
    except OSError as error:
        return [_unreadable(error, folder)]
    if not models:
        return [Finding(troubles.NOT_A_MODEL, f"{folder} has no {CONFIG_FILE}, no version and no such folders")]
    names = [model.name for model in models]
    return [finding for model in models for finding in _findings_in_model(model, names)]


def _is_model(folder: Path) -> bool:
    try:
        return (folder / CONFIG_FILE).exists() or bool(version_folders(folder))
    except PermissionError:
        return True  # whatever it is, that is what has to be said of it


def _findings_in_model(folder: Path, models: Collection[str] = ()) -> list[Finding]:
    """Return what is wrong in a model's folder; ``models`` are all of its repository, where that is known."""
    name = folder.name
    try:
        message = read_config(folder)
    except ModelError as error:
        return [Finding(troubles.CONFIG_NOT_READ, " ".join(str(error).split()), name), *_of_copies(folder)]
    except OSError as error:
        return [_unreadable(error, folder)]
    config: dict[str, Any] = json_format.MessageToDict(message, preserving_proto_field_name=True)
    if not is_of_python_backend(config):
        return []
    try:
        codes = _codes(folder, config.get("default_model_filename") or CODE_FILE)
        if not (config.get("backend") or codes) and _has_other_code(folder):
            return []
        return [
            *_of_folder(folder, config, codes),
            *(finding for code in codes for finding in _of_code(code, name)),
            *(_of_tensors(message, name) if not _completes(codes) else []),
            *(_of_declaration(config, codes, name) if _has_config(folder, codes) else []),
            *(_of_names(config, codes, name, models) if not _completes(codes) else []),
            *_of_copies(folder),
        ]
    except OSError as error:
        return [_unreadable(error, folder)]


def _completes(codes: list[ModelCode]) -> bool:
    return any(code.mentions("auto_complete_config") for code in codes)


def _has_config(folder: Path, codes: list[ModelCode]) -> bool:
    return (folder / CONFIG_FILE).exists() or _completes(codes)


def _codes(folder: Path, file: str) -> list[ModelCode]:
    return [ModelCode.read(version / file) for version in version_folders(folder) if (version / file).is_file()]


def _has_other_code(folder: Path) -> bool:
    """Return whether a version has what Triton tells another backend by, as ``model.onnx``."""
    return any(each.suffix != ".py" for version in version_folders(folder) for each in version.glob("model.*"))


def _of_folder(folder: Path, config: dict[str, Any], codes: list[ModelCode]) -> Iterator[Finding]:
    name = folder.name
    if config.get("name", name) != name:
        yield Finding(
            troubles.OTHER_NAME, f"{folder / CONFIG_FILE} has name {config['name']!r}; expected {name!r}", name
        )
    versions = version_folders(folder)
    if not versions:
        yield Finding(troubles.NO_VERSION, f"{folder} has no folder whose name is a number", name)
    file = config.get("default_model_filename") or CODE_FILE
    for version in versions:
        if all(code.file.parent != version for code in codes):
            yield Finding(troubles.NO_CODE, f"there is no {version / file}", name)
    if not _has_config(folder, codes):
        yield Finding(troubles.NO_CONFIG, f"there is no {folder / CONFIG_FILE}, and no auto_complete_config", name)


def _of_code(code: ModelCode, model: str) -> Iterator[Finding]:
    if code.error:
        yield Finding(troubles.CODE_DOES_NOT_PARSE, code.error, model)
    elif not code.defines(MODEL_CLASS):
        yield Finding(troubles.NO_MODEL_CLASS, f"{code.file} has no class {MODEL_CLASS}", model)
    for line, name in code.dropped:
        yield Finding(troubles.NOT_RETURNED, f"{code.file}:{line}: nothing is done with what {name} returns", model)


def _of_tensors(message: Any, model: str) -> Iterator[Finding]:
    try:
        check_tensors(message)
    except ModelError as error:
        yield Finding(troubles.BAD_TENSOR, str(error), model)


def _of_declaration(config: dict[str, Any], codes: list[ModelCode], model: str) -> Iterator[Finding]:
    """Yield what the configuration and the code say of each other."""
    if not any(code.mentions("ShmSession") for code in codes):
        found = f"{', '.join(str(code.file) for code in codes)}: no ShmSession"
        if not mentions_shared_memory(config):
            yield Finding(troubles.ORDINARY_MODEL, found, model)
            return
        if codes and not any(code.error or code.inherits for code in codes):  # which may hide one
            yield Finding(NO_SESSION, found, model)
    if not _completes(codes):
        yield from _of_modes(config, codes, model)
    for finding in findings_in_config(config, model):
        if not (_completes(codes) and finding.trouble in (NO_SHM_INPUT, NO_SHM_PATHS)):  # which it may add at load
            yield finding


def _of_modes(config: dict[str, Any], codes: list[ModelCode], model: str) -> Iterator[Finding]:
    """Yield where the code has calls for decoupled models alone, or for others alone, and the model is another."""
    is_decoupled = bool(config.get("model_transaction_policy", {}).get("decoupled"))
    for code in codes:
        answering = [name for name in ANSWERING if code.mentions(name)]
        if code.mentions(STREAMING) and not answering and not is_decoupled:
            said = f"is for decoupled models, and {CONFIG_FILE} does not call the model one"
            yield Finding(troubles.OTHER_MODE, f"{code.file}: {STREAMING} {said}", model)
        elif answering and is_decoupled and not (code.mentions(STREAMING) or code.mentions("stream")):
            said = f"is for models that are not decoupled, and {CONFIG_FILE} calls the model decoupled"
            yield Finding(troubles.OTHER_MODE, f"{code.file}: {answering[0]} {said}", model)


def _of_names(config: dict[str, Any], codes: list[ModelCode], model: str, models: Collection[str]) -> Iterator[Finding]:
    """Yield where the code of a session names a tensor, or a model to forward to, that there is not."""
    there = {kind: [str(each.get("name")) for each in config.get(kind, ())] for kind in ("input", "output")}
    there["model"] = [*models]
    for code in codes:
        for line, kind, name in code.named if code.mentions("ShmSession") else ():
            if there[kind] and name not in there[kind]:
                found = f"{code.file}:{line}: there is no {kind} {name!r}; there are: {names_told(name, there[kind])}"
                yield Finding(troubles.UNKNOWN_NAME, found, model)


def _copies(folder: Path) -> list[Path]:
    """Return the copies that model.py may import: its version's folder is looked into first, then the model's."""
    return [place / PACKAGE for place in (*version_folders(folder), folder) if os.path.lexists(place / PACKAGE)]


def _of_copies(folder: Path) -> Iterator[Finding]:
    try:
        found = [
            (copy, _said_in(copy, *_LIBRARY_VERSION), _said_in(copy, *_PROTOCOL_VERSION)) for copy in _copies(folder)
        ]
    except OSError as error:
        yield _unreadable(error, folder)
        return
    for copy, version, protocol in found:
        if (version, protocol) != (__version__, str(VERSION)):
            said = f"is of version {version} and protocol {protocol}, and this is {__version__} and {VERSION}"
            yield Finding(troubles.OTHER_COPY, f"{copy} {said}", folder.name)


def _said_in(copy: Path, file: str, pattern: re.Pattern[bytes]) -> str:
    """Return what a copy's file says; nothing of it is imported."""
    try:
        said = pattern.search(read_source(copy / file))
    except (FileNotFoundError, NotADirectoryError, NoSourceError):
        said = None
    return "?" if said is None else said[1].decode(errors="replace")


def _unreadable(error: OSError, folder: Path) -> Finding:
    place = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else str(folder)
    return Finding(troubles.UNREADABLE, f"{place}: {error.strerror or error}", folder.name)
