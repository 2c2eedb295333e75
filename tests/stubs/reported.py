"""What Triton's modules have in a running stub process, as the model ``backend_names`` reports it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from shm_backend_utils.client import ShmClient

from .described import Described, Parameter, Signature

__all__ = ["Report", "report_of"]

UNTYPED: Final = {
    *("__module__", "__doc__", "__dict__", "__weakref__", "__repr__", "__str__", "__getstate__", "__setstate__"),
    "__entries",  # what pybind11 keeps
}
NO_CONSTRUCTOR: Final = "Initialize self.  See help(type(self)) for accurate signature."
NO_NAME: Final = re.compile(r"arg\d+$")
NOT_COMPARED: Final = re.compile(r"::|^(object|capsule|handle|numpy\..*|TRITONSERVER_.*)$")


class Report(NamedTuple):
    """What there is while ``model.py`` is imported, and afterwards, by module; and the server's version."""

    names_at_import: dict[str, list[str]]
    names: dict[str, dict[str, Described]]
    version: tuple[int, int]


def report_of(client: ShmClient) -> Report:
    """Ask a server that has the model."""
    report = json.loads(bytes(client.infer("backend_names", {}, outputs={"REPORT": 1 << 20})["REPORT"]))
    major, minor, _ = client.get_server_metadata()["version"].split(".")
    return Report(
        {
            module: [name for name in names if not name.startswith("__")]
            for module, names in report["at import"].items()
        },
        {module: dict(_described(names)) for module, names in report["now"].items()},
        (int(major), int(minor)),
    )


def _described(names: dict[str, dict[str, Any]], owner: str = "") -> Iterator[tuple[str, Described]]:
    for name, facts in names.items():
        signature = facts.get("signature")
        if name in UNTYPED or signature == NO_CONSTRUCTOR or (not owner and name.startswith("__")):
            continue
        number = re.fullmatch(r"-?\d+", facts.get("value", ""))
        yield (
            owner + name,
            Described(
                facts["kind"],
                None if signature is None else _signature(signature, owner.rstrip(".")),
                None if number is None else int(number[0]),
            ),
        )
        yield from _described(facts.get("names", {}), f"{owner}{name}.")


def _signature(text: str, owner: str) -> Signature:
    """Return a signature as pybind11 or inspect writes it."""
    match = re.fullmatch(r"\w+\((.*)\)(?: -> (.+))?", text)
    assert match is not None, text
    parameters = [_parameter(parameter) for parameter in _split(match[1])]
    if parameters and parameters[0].name == "self":
        _, _, type_ = parameters.pop(0)
        if owner and type_ == "str":  # a function of the class, which pybind11 was told is a method
            parameters.insert(0, Parameter(None, None, type_))
    return Signature(tuple(parameters), None if match[2] is None else _type(match[2]))


def _split(parameters: str) -> list[str]:
    """Return the parts between the commas that are in no brackets."""
    parts, depth = [""], 0
    for character in parameters:
        depth += (character in "([<{") - (character in ")]>}")
        if character == "," and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]


def _parameter(text: str) -> Parameter:
    declaration, _, default = text.partition(" = ") if ": " in text else text.partition("=")
    name, _, type_ = declaration.partition(": ")
    literal = "..." if default.startswith("<") else default
    return Parameter(None if NO_NAME.match(name) else name, literal or None, _type(type_) if type_ else None)


def _type(text: str) -> str | None:
    if NOT_COMPARED.search(text):
        return None
    for old, new in (("List[", "list["), ("Set[", "set["), ("Tuple[", "tuple["), ("c_python_backend_utils.", "")):
        text = text.replace(old, new)
    return text.rpartition(".")[2].lstrip("_")
