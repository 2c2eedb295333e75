"""Clients' registrations at the server, by Triton's system shared memory extension: they map names to memory."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPException
from typing import Any, Final

from ..errors import MachineError
from ..http.questions import KeptConnections, fetch_json

__all__ = ["Registration", "StatusEndpoint", "fetch_registrations"]

_TIMEOUT_S: Final = 5.0
_SPELT_AS_IT_IS: Final = re.compile(r"[\w.~-]+", re.ASCII)  # needs no escapes in a URL: Triton does not decode them
_MOST_AT_ONCE: Final = 4  # questions, each over a connection


@dataclass(frozen=True, slots=True)
class Registration:
    """A registered system shared-memory region: a part of an object, whose key usually has a leading slash."""

    key: str
    offset: int
    byte_size: int


class StatusEndpoint:
    """One server's endpoint for registrations, over HTTP. Nothing is cached. Thread-safe."""

    def __init__(self, server_url: str) -> None:
        self._server_url = server_url
        self._connections = KeptConnections(server_url, _TIMEOUT_S)

    def find(self, names: Sequence[str]) -> dict[str, Registration]:
        """Return the registrations of those names that have one; MachineError if no Triton server answers."""
        if len(names) <= _MOST_AT_ONCE and all(map(_SPELT_AS_IT_IS.fullmatch, names)):
            try:
                return self._each(names)
            except TimeoutError:
                raise _no_answer() from None
            except (OSError, HTTPException, ValueError, KeyError, TypeError):
                pass  # the cause may be a name that is not registered: the whole list shows that
        current = self.all()
        return {name: current[name] for name in names if name in current}

    def _each(self, names: Sequence[str]) -> dict[str, Registration]:
        answers = self._connections.get([f"/v2/systemsharedmemory/region/{name}/status" for name in names])
        found = {}
        for name, (status, body) in zip(names, answers, strict=True):
            (region,) = json.loads(body)
            if status != HTTPStatus.OK or region["name"] != name:
                raise ValueError("not what was asked for")
            found[name] = _registration_of(region)
        return found

    def all(self) -> dict[str, Registration]:
        """Ask for all registrations, by name; raises like :meth:`find`."""
        return fetch_registrations(self._server_url)

    def close(self) -> None:
        """Close the connections. Others may be opened afterwards."""
        self._connections.close()


def fetch_registrations(server_url: str) -> dict[str, Registration]:
    """Ask the server for all registrations by name; MachineError if no Triton server answers."""
    try:
        return {
            region["name"]: _registration_of(region)
            for region in fetch_json(f"{server_url}/v2/systemsharedmemory/status", _TIMEOUT_S)
        }
    except (OSError, HTTPException, ValueError, KeyError, TypeError):
        raise _no_answer() from None


def _registration_of(region: Any) -> Registration:
    return Registration(region["key"], int(region["offset"]), int(region["byte_size"]))


def _no_answer() -> MachineError:
    return MachineError("the server's HTTP endpoint, which lists registered regions, does not answer")
