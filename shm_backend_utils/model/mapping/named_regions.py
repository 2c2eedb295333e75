"""Regions that clients have registered at the server: what their names stand for now, and how they are mapped."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Final

from ...errors import RegionGoneError
from ...memory.registrations import Registration, StatusEndpoint
from ...protocol.claims import NamedRegionClaim
from ..config import Config
from . import policy
from .mapped import MappedRegion
from .memory import Memory, Pinning
from .registry import Registry

__all__ = ["NamedRegions"]

_PREFIX: Final = "registered: "  # no managed region's key has a colon


class NamedRegions:
    """Finds, or maps, what registered names stand for. Thread-safe; no request waits for another one's mapping."""

    def __init__(self, config: Config, registry: Registry, pinning: Pinning | None) -> None:
        self._config = config
        self._registry = registry
        self._pinning = pinning
        self._server = StatusEndpoint(config.server_url)
        self._lock = threading.Lock()
        self._registrations: dict[str, Registration] = {}

    def find(self, names: Sequence[str], field: str) -> dict[str, Registration]:
        """Return what the names of a request stand for; raises as :func:`.policy.ask`.

        The server is asked for each request, over a kept connection, unless names are trusted: 60 to 90 µs. On an event
        loop all requests wait for that.
        """
        if self._config.checks_registrations:
            return policy.ask(names, self._server.find, self._config, field)
        known = {name: found for name in names if (found := self._registrations.get(name)) is not None}
        trusted = {name: found for name, found in known.items() if self._registry.live(_name_of(name, found), field)}
        if len(trusted) == len(names):
            return trusted
        return policy.ask(names, self._server.find, self._config, field)

    def open(
        self, claim: NamedRegionClaim, found: Mapping[str, Registration], field: str
    ) -> tuple[MappedRegion, Memory]:
        """Return the mapping of what a name stands for, of what :meth:`find` has found, and the part that it names."""
        try:
            registration = policy.resolve(claim, found, self._config, field)
        except RegionGoneError:
            self._forget(claim.name)
            raise

        def open_it() -> MappedRegion:
            segment = policy.open_registered(registration, self._config, field, self._registry.check_room)
            return MappedRegion(segment, pinning=self._pinning)

        with self._lock:
            before = self._registrations.get(claim.name)
            self._registrations[claim.name] = registration
        if before is not None and before != registration:
            self._registry.unregister(_name_of(claim.name, before))
        offset, byte_size = registration.offset, registration.byte_size
        try:
            mapped = self._registry.obtain(_name_of(claim.name, registration), open_it, offset, byte_size, field)
        except BaseException:
            self._forget(claim.name)
            raise
        return mapped, mapped.memory.part(offset, byte_size)

    def sweep(self) -> None:
        """Unmap what is not registered any more, and all of it if the server does not say so."""
        self._drop_late()
        known = dict(self._registrations)
        if not known:
            return
        current: Mapping[str, Registration] = {}  # who does not answer vouches for nothing
        try:
            current = self._server.all()
        finally:
            self._drop_changed(known, current)

    def close(self) -> None:
        """Forget all names, and hang up. Their mappings are the registry's."""
        self._registrations.clear()
        self._server.close()

    def _drop_changed(self, known: Mapping[str, Registration], current: Mapping[str, Registration]) -> None:
        for name, registration in known.items():
            if current.get(name) != registration:
                self._forget(name)

    def _forget(self, name: str) -> None:
        with self._lock:
            registration = self._registrations.pop(name, None)
        if registration is not None:
            self._registry.unregister(_name_of(name, registration))

    def _drop_late(self) -> None:
        """Unmap what was mapped by a request that was told what a name stood for before another one was told more."""
        there = [status.name for status in self._registry.statuses() if status.name.startswith(_PREFIX)]
        wanted = {_name_of(*each) for each in list(self._registrations.items())}
        for name in there:
            if name not in wanted:
                self._registry.unregister(name)


def _name_of(name: str, registration: Registration) -> str:
    """Return what a mapping is called: by the whole of what it is, so that no name can get another one's memory."""
    return f"{_PREFIX}{registration.key}/{registration.offset}/{registration.byte_size}/{name}"
