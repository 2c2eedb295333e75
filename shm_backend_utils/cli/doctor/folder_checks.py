"""Finds faults in a model's configuration, code and copies of this library, without a server or running the code."""

from __future__ import annotations

import ast
import os
import re
import warnings
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from google.protobuf import json_format

from ... import __version__
from ...errors import ModelError, name_list
from ...model_spec import is_of_python_backend
from ...protocol.layout import VERSION
from ...repository.config import check_tensors, read_config
from ...repository.files import CODE_FILE, CONFIG_FILE, NoSourceError, read_source, version_folders
from .checkup import Finding
from .config_checks import findings_in_config, mentions_shared_memory
from .troubles import Trouble

__all__ = ["STREAMING", "ModelCode", "findings_in_folder"]

MODEL_CLASS: Final = "TritonPythonModel"
PACKAGE: Final = __name__.partition(".")[0]  # the name of this library's folder, wherever it is copied
ANSWERING: Final = ("serve", "serve_async", "serve_batch")  # a session's calls whose result ``execute`` is to return
STREAMING: Final = "serve_streams"  # that of decoupled models, whose ``execute`` returns nothing
_MOST_NAMES: Final = 5
_NAMING: Final = {
    **{"input": (1, "input"), "find_input": (1, "input"), "put": (2, "output")},
    **dict.fromkeys(("output", "device_output"), (3, "output")),
    **dict.fromkeys(("forward", "forward_async"), (2, "model")),
}
"""Methods of a request whose first argument is a name: their least number of arguments, and the kind of that name."""

_LIBRARY_VERSION: Final = "__init__.py", re.compile(rb'^__version__\b.*= "([^"\n]+)"', re.MULTILINE)
_PROTOCOL_VERSION: Final = "protocol/layout.py", re.compile(rb"^VERSION\b.*= (\d+)", re.MULTILINE)


@dataclass(frozen=True)
class ModelCode:
    """Facts about a model's code, from its syntax."""

    file: Path  # with the model's class
    error: str  # why it cannot be parsed, with the line; empty if it can
    names: frozenset[str]  # all that it binds at module level; * after `from … import *`
    mentioned: frozenset[str]  # all names and attributes in it, and in the modules beside it
    inherits: bool = False  # its class has a base or is imported, so some of its code is not seen here
    # The session's calls in execute whose responses are dropped: the line and the call.
    dropped: tuple[tuple[int, str], ...] = ()
    # The calls with a literal name: the line, the kind ("input", "output" or "model"), and the name.
    named: tuple[tuple[int, str, str], ...] = ()

    @classmethod
    def read(cls, file: Path) -> ModelCode:
        """Read a file; OSError if it cannot be read, or one beside it."""
        try:
            tree = _parsed(file)
        except SyntaxError as error:
            return cls(file, f"{file}:{error.lineno or 1}: {error.msg}", frozenset(), frozenset())
        except (ValueError, RecursionError, MemoryError) as error:
            return cls(file, f"{file}: {str(error) or 'it is nested too deeply'}", frozenset(), frozenset())
        names = frozenset(name for node in tree.body for name in _bound_by(node))
        mentioned = frozenset[str]().union(_mentioned_in(tree), *map(_mentioned_beside, _beside(file)))
        classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == MODEL_CLASS]
        inherits = not classes or any(node.bases for node in classes)
        return cls(file, "", names, mentioned, inherits, tuple(_dropped_in(tree)), tuple(_named_in(tree)))

    def defines(self, name: str) -> bool:
        """Return whether the module has a name, as far as its syntax tells."""
        return bool({name, "*"} & self.names)

    def mentions(self, name: str) -> bool:
        """Return whether a name stands anywhere in the code, or in that of the modules beside it."""
        return name in self.mentioned


def _parsed(file: Path) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python would print them with the source line, unescaped
        return ast.parse(read_source(file), str(file))


def _beside(file: Path) -> list[Path]:
    """Return the other modules that a model's code may import: in the version's folder and in the model's."""
    of_version = [each for each in file.parent.rglob("*.py") if PACKAGE not in each.relative_to(file.parent).parts]
    return sorted({*of_version, *file.parents[1].glob("*.py")} - {file})


def _mentioned_beside(file: Path) -> frozenset[str]:
    try:
        return _mentioned_in(_parsed(file))
    except (SyntaxError, ValueError, RecursionError, MemoryError, NoSourceError):  # it may never be imported
        return frozenset()


def _mentioned_in(tree: ast.AST) -> frozenset[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.alias):
            found.add(node.name.rpartition(".")[2])
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
    return frozenset(found)


def _dropped_in(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) and function.name == "execute":
            for node in ast.walk(function):
                call = node.value if isinstance(node, ast.Expr) else None
                call = call.value if isinstance(call, ast.Await) else call
                if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in ANSWERING:
                    yield call.lineno, _dotted(call.func)


def _named_in(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """Yield the names in calls of a request, which is a function's last argument, or the target of a ``with``."""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            nodes = [*ast.walk(function)]
            requests = [each.optional_vars for each in nodes if isinstance(each, ast.withitem)]
            names = {each.id for each in requests if isinstance(each, ast.Name)}
            names |= {each.arg for each in function.args.args[-1:]}
            for node in nodes:
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
                    owner, first = node.func.value, node.args[0]
                    least, what = _NAMING.get(node.func.attr, (0, ""))
                    is_request = isinstance(owner, ast.Name) and owner.id in names
                    name = first.value if isinstance(first, ast.Constant) else None
                    if is_request and what and isinstance(name, str) and len(node.args) + len(node.keywords) >= least:
                        yield node.lineno, what, name


def _dotted(called: ast.Attribute) -> str:
    """Return the last names of a called attribute: ``ast.unparse`` fails on very long chains."""
    names: list[str] = []
    node: ast.expr = called
    while isinstance(node, ast.Attribute) and len(names) < _MOST_NAMES:
        names.append(node.attr)
        node = node.value
    names.append(node.id if isinstance(node, ast.Name) else "…")
    return ".".join(reversed(names))


def _bound_by(node: ast.stmt) -> list[str]:
    """Return the names that a statement at the top of a module binds; those inside ``if`` and ``try``, too."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return [node.name]
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [alias.asname or alias.name for alias in node.names]
    names = []
    for each in ast.walk(node):
        if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
            names.append(each.id)
        elif isinstance(each, ast.ClassDef | ast.Import | ast.ImportFrom):
            names += _bound_by(each)
    return names


def findings_in_folder(folder: Path) -> list[Finding]:
    """Return the faults of a model's folder, or of each in a repository; none for models of other backends."""
    try:
        folder = folder.absolute()
        if not folder.is_dir():
            found = "is not a folder" if folder.exists() else "does not exist"
            return [Finding(Trouble.NOT_A_MODEL, f"{folder} {found}")]
        if _is_model(folder):
            return _findings_in_model(folder)
        models = [each for each in sorted(folder.iterdir()) if each.is_dir() and _is_model(each)]
    except OSError as error:
        return [_unreadable(error, folder)]
    if not models:
        return [Finding(Trouble.NOT_A_MODEL, f"{folder} has no {CONFIG_FILE}, no version folder, no model's folder")]
    names = [model.name for model in models]
    return [finding for model in models for finding in _findings_in_model(model, names)]


def _is_model(folder: Path) -> bool:
    try:
        return (folder / CONFIG_FILE).exists() or bool(version_folders(folder))
    except PermissionError:
        return True  # reading it fails again, and that is a finding


def _findings_in_model(folder: Path, models: Collection[str] = ()) -> list[Finding]:
    """Return the faults in a model's folder; ``models`` names all of its repository, if known."""
    name = folder.name
    try:
        message = read_config(folder)
    except ModelError as error:
        return [Finding(Trouble.CONFIG_NOT_READ, " ".join(str(error).split()), name), *_of_copies(folder)]
    except OSError as error:
        return [_unreadable(error, folder)]
    config: dict[str, Any] = json_format.MessageToDict(message, preserving_proto_field_name=True)
    if not is_of_python_backend(config):
        return []
    try:
        files = [version / (config.get("default_model_filename") or CODE_FILE) for version in version_folders(folder)]
        codes = [ModelCode.read(file) for file in files if file.is_file()]
        if not (config.get("backend") or codes) and _has_other_code(folder):
            return []
        return [
            *_of_folder(folder, config, codes, files),
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


def _has_other_code(folder: Path) -> bool:
    """Return whether a version has a file by which Triton recognises another backend, as ``model.onnx``."""
    return any(each.suffix != ".py" for version in version_folders(folder) for each in version.glob("model.*"))


def _of_folder(folder: Path, config: dict[str, Any], codes: list[ModelCode], files: list[Path]) -> Iterator[Finding]:
    name = folder.name
    if config.get("name", name) != name:
        yield Finding(
            Trouble.OTHER_NAME, f"{folder / CONFIG_FILE} has name {config['name']!r}; expected {name!r}", name
        )
    if not files:
        yield Finding(Trouble.NO_VERSION_FOLDER, f"{folder} has no folder whose name is a number", name)
    for file in files:
        if all(code.file != file for code in codes):
            yield Finding(Trouble.NO_MODEL_CODE, f"there is no {file}", name)
    if not _has_config(folder, codes):
        yield Finding(Trouble.NO_CONFIG, f"there is no {folder / CONFIG_FILE}, and no auto_complete_config", name)


def _of_code(code: ModelCode, model: str) -> Iterator[Finding]:
    if code.error:
        yield Finding(Trouble.CODE_DOES_NOT_PARSE, code.error, model)
    elif not code.defines(MODEL_CLASS):
        yield Finding(Trouble.NO_MODEL_CLASS, f"{code.file} has no class {MODEL_CLASS}", model)
    for line, name in code.dropped:
        yield Finding(Trouble.NOT_RETURNED, f"{code.file}:{line}: the result of {name} is not returned", model)


def _of_tensors(message: Any, model: str) -> Iterator[Finding]:
    try:
        check_tensors(message)
    except ModelError as error:
        yield Finding(Trouble.BAD_TENSOR, str(error), model)


def _of_declaration(config: dict[str, Any], codes: list[ModelCode], model: str) -> Iterator[Finding]:
    """Yield the findings about configuration and code together."""
    if not any(code.mentions("ShmSession") for code in codes):
        found = f"{', '.join(str(code.file) for code in codes)}: no ShmSession"
        if not mentions_shared_memory(config):
            yield Finding(Trouble.ORDINARY_MODEL, found, model)
            return
        if codes and not any(code.error or code.inherits for code in codes):  # where a session may be unseen
            yield Finding(Trouble.NO_SESSION, found, model)
    if not _completes(codes):
        yield from _of_modes(config, codes, model)
    for finding in findings_in_config(config, model):
        may_be_added = finding.trouble in (Trouble.NO_SHM_INPUT, Trouble.NO_SHM_PATHS)  # by auto_complete
        if not (_completes(codes) and may_be_added):
            yield finding


def _of_modes(config: dict[str, Any], codes: list[ModelCode], model: str) -> Iterator[Finding]:
    """Yield findings where the code has only calls for decoupled models, or only for others, and the model differs."""
    is_decoupled = bool(config.get("model_transaction_policy", {}).get("decoupled"))
    for code in codes:
        answering = [name for name in ANSWERING if code.mentions(name)]
        if code.mentions(STREAMING) and not answering and not is_decoupled:
            problem = f"is for decoupled models, but {CONFIG_FILE} does not set decoupled: true"
            yield Finding(Trouble.OTHER_MODE, f"{code.file}: {STREAMING} {problem}", model)
        elif answering and is_decoupled and not (code.mentions(STREAMING) or code.mentions("stream")):
            problem = f"is for models that are not decoupled, but {CONFIG_FILE} sets decoupled: true"
            yield Finding(Trouble.OTHER_MODE, f"{code.file}: {answering[0]} {problem}", model)


def _of_names(config: dict[str, Any], codes: list[ModelCode], model: str, models: Collection[str]) -> Iterator[Finding]:
    """Yield findings where a session's code names a tensor, or a model to forward to, that does not exist."""
    there = {kind: [str(each.get("name")) for each in config.get(kind, ())] for kind in ("input", "output")}
    there["model"] = [*models]
    for code in codes:
        for line, kind, name in code.named if code.mentions("ShmSession") else ():
            if there[kind] and name not in there[kind]:
                found = f"{code.file}:{line}: there is no {kind} {name!r}; there are: {name_list(name, there[kind])}"
                yield Finding(Trouble.UNKNOWN_NAME, found, model)


def _of_copies(folder: Path) -> Iterator[Finding]:
    """Yield the copies of another release that model.py may import, from its version's folder or the model's."""
    try:
        for copy in [place / PACKAGE for place in (*version_folders(folder), folder)]:
            if os.path.lexists(copy):
                version, protocol = _constant_in(copy, *_LIBRARY_VERSION), _constant_in(copy, *_PROTOCOL_VERSION)
                if (version, protocol) != (__version__, str(VERSION)):
                    problem = f"has version {version} and protocol {protocol}; expected {__version__} and {VERSION}"
                    yield Finding(Trouble.OTHER_COPY, f"{copy} {problem}", folder.name)
    except OSError as error:
        yield _unreadable(error, folder)


def _constant_in(copy: Path, file: str, pattern: re.Pattern[bytes]) -> str:
    """Return the version that a pattern finds in a copy's file, without importing the copy."""
    try:
        problem = pattern.search(read_source(copy / file))
    except (FileNotFoundError, NotADirectoryError, NoSourceError):
        problem = None
    return "?" if problem is None else problem[1].decode(errors="replace")


def _unreadable(error: OSError, folder: Path) -> Finding:
    place = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else str(folder)
    return Finding(Trouble.UNREADABLE, f"{place}: {error.strerror or error}", folder.name)
