"""Names that are registered, unregistered and registered anew between requests: each request means what holds then."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from shm_backend_utils.compat.attach import attach
from shm_backend_utils.server import EmbeddedServer

from .plain_client import PlainClient, PlainRegion

PAGE: Final = 4096
PAGES: Final = 3
NAMES: Final = 3
OBJECTS: Final = 3
STEPS: Final = 400
ROW: Final = 64  # bytes of a tensor


class Names(PlainClient):
    """Objects whose pages each begin with a number of their own, and names that stand for parts of them."""

    def __init__(self, protocol: str, server: EmbeddedServer) -> None:
        super().__init__(protocol, server)
        self.chance = random.Random(protocol)
        self._objects = [PlainRegion(PAGES * PAGE) for _ in range(OBJECTS)]
        self._names = [f"{self._objects[0].name}-{number}" for number in range(NAMES)]
        for number in range(OBJECTS):
            for page in range(PAGES):
                self.begin_of(number, page)[:] = self.value(number, page)
        self.meanings: dict[str, tuple[int, int]] = {}

    @staticmethod
    def value(number: int, page: int) -> int:
        return 100 * number + page

    def begin_of(self, number: int, page: int, offset: int = 0) -> Any:
        """Return the first numbers of a page, as the object has them now."""
        return self._objects[number].view(np.float32, [ROW // 4], page * PAGE + offset)

    def change(self) -> None:
        name = self.chance.choice(self._names)
        taken = {number for number, _ in self.meanings.values()}  # 2.51 does not register an object twice
        free = [number for number in range(OBJECTS) if number not in taken]
        if name in self.meanings:
            self.client.unregister_system_shared_memory(name)
            free.append(self.meanings.pop(name)[0])
            if self.chance.random() < 0.3:
                return
        if free:
            number, page = self.chance.choice(free), self.chance.randrange(PAGES)
            self.client.register_system_shared_memory(
                name, self._objects[number].key, (PAGES - page) * PAGE, offset=page * PAGE
            )
            self.meanings[name] = (number, page)

    def ask(self) -> None:
        """Send a request that names two of them, and check that it reads and writes what they stand for."""
        source, target = (self.chance.choice(self._names) for _ in range(2))
        x = self.module.InferInput("INPUT0", [ROW // 4], "FP32")
        x.set_shared_memory(source, ROW)
        y = self.module.InferRequestedOutput("OUTPUT0")
        y.set_shared_memory(target, ROW, ROW)
        try:
            self.client.infer("identity", **attach("identity", [x], [y]))
        except InferenceServerException as error:
            assert "not registered" in str(error)  # noqa: PT017  # an error is one of two right answers
            assert not {source, target} <= self.meanings.keys()
            return
        assert {source, target} <= self.meanings.keys()
        written = self.begin_of(*self.meanings[target], ROW)
        assert written.tolist() == [self.value(*self.meanings[source])] * (ROW // 4)
        written[:] = -1
        for number in range(OBJECTS):
            for page in range(PAGES):
                assert (self.begin_of(number, page, ROW) <= 0).all(), "nothing else was written"

    def close(self) -> None:
        for name in self.meanings:
            self.client.unregister_system_shared_memory(name)
        for each in self._objects:
            each.destroy()
        super().close()


@pytest.fixture
def names(protocol: str, triton_server: EmbeddedServer) -> Iterator[Names]:
    with contextlib.closing(Names(protocol, triton_server)) as names:
        yield names


def test_a_request_means_what_names_stand_for_whatever_they_stood_for_before(names: Names) -> None:
    for _ in range(STEPS):
        for _ in range(names.chance.randrange(3)):
            names.change()
        for _ in range(names.chance.randrange(4)):
            names.ask()
