"""config.pbtxt, read by protobuf; what is wrong in it is told with its line and column."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Any, Final

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from ...errors import ModelError
from ...repository_layout import CONFIG_FILE
from ...source_files import read_source

__all__ = ["read_config"]

_PLACE: Final = re.compile(r"^\d+:\d+ : ")
_NO_FIELD: Final = re.compile(r'Message type "inference\.([\w.]+)" has no field named "([^"]*)"')
_NO_VALUE: Final = re.compile(r'Enum type "inference\.([\w.]+)" has no value named ([\w-]+)')


def read_config(folder: Path) -> Any:
    """Return the ``ModelConfig`` of a model's folder; an empty one if there is no file.

    Raises
    ------
    ModelError
        It is none; the message has file, line and column, what protobuf says, and what to write.
    OSError
        It cannot be read, or is no file.
    """
    file = folder / CONFIG_FILE
    config = model_config_pb2.ModelConfig()
    if not file.exists():
        return config
    try:
        text = read_source(file).decode()
    except UnicodeDecodeError as error:
        raise ModelError(f"{file}: byte {error.start} is no UTF-8; save the file as UTF-8") from None
    try:
        text_format.Parse(text, config)
    except text_format.ParseError as error:
        said = _PLACE.sub("", str(error))
        line, column = error.GetLine() or 1, error.GetColumn() or 1
        raise ModelError(f"{file}:{line}:{column}: {said}{_remedy(said)}") from None
    return config


def _remedy(said: str) -> str:
    field, value = _NO_FIELD.search(said), _NO_VALUE.search(said)
    if field is not None:
        known = [each.name for each in _descriptor(field[1]).fields]
        return _meant(field[2], known)
    if value is not None:
        return _meant(value[2], [each.name for each in _descriptor(value[1]).values])
    return "; it is protobuf's text format of inference.ModelConfig, see Triton's model_configuration.md"


def _meant(found: str, known: list[str]) -> str:
    close = difflib.get_close_matches(found, known, n=1)
    return f" Did you mean {close[0]}?" if close else f" Expected one of {', '.join(known)}."


def _descriptor(name: str) -> Any:
    """Return a message or an enum of the configuration, whose names may be nested: ``ModelInput.Format``."""
    first, *nested = name.split(".")
    file = model_config_pb2.DESCRIPTOR
    found = file.message_types_by_name.get(first) or file.enum_types_by_name[first]
    for each in nested:
        found = found.nested_types_by_name.get(each) or found.enum_types_by_name[each]
    return found
