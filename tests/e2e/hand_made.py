"""Requests on the direct path that a test can break, sent by plain tritonclient over gRPC or HTTP."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tritonclient.grpc
import tritonclient.http

from shm_backend_utils.protocol.spans import Table
from tests.unit.table_client import Client

Array = npt.NDArray[np.float32]


class HandMade(Client):
    """A region, and what is to be said in its first slot: a valid table, until a test says something else."""

    def __init__(self, url: str, model: str, inputs: Mapping[str, Array], outputs: Mapping[str, int], slots: int = 1):
        super().__init__(model, slots)
        self.url = url
        self.table = self.laid_out(inputs, outputs)
        self.said: Table | bytes = self.table
        self.parameters: dict[str, Any] = {}
        self._clients: dict[str, Any] = {}

    def write(self) -> None:
        self._written = self.begin(self.said)

    def infer(self, carriers: Sequence[Any] = ()) -> Any:
        """Write the table and send the request; return the response, or raise InferenceServerException."""
        self.write()
        return self.send(carriers)

    def send(self, carriers: Sequence[Any] = (), *, url: str | None = None) -> Any:
        parameters = {**self._written, **self.parameters}
        return self.client(url or self.url).infer(self.model, list(carriers), parameters=parameters)

    def stream(self, callback: Callable[[Any, Any], None]) -> None:
        """Write the table and send it to a decoupled model; responses are passed on as they come."""
        self.write()
        parameters, client = {**self._written, **self.parameters}, self.client(self.url)
        client.start_stream(callback)
        client.async_stream_infer(self.model, [], parameters=parameters, enable_empty_final_response=True)

    def client(self, url: str) -> Any:
        if url not in self._clients:
            module: Any = tritonclient.http if url.startswith("http://") else tritonclient.grpc
            self._clients[url] = module.InferenceServerClient(url.removeprefix("http://"))
        return self._clients[url]

    def content(self) -> bytes:
        """Return the whole region, but for the client's half of the slot's record."""
        everything = bytearray(self.region.bytes().tobytes())
        begin, room = self.region.record_offset(0), self.region.record(0).room
        everything[begin : begin + room] = bytes(room)
        return bytes(everything)

    def close(self) -> None:
        for client in self._clients.values():
            client.close()
        super().close()


@contextlib.contextmanager
def hand_made(*arguments: Any, **named: Any) -> Iterator[HandMade]:
    with contextlib.closing(HandMade(*arguments, **named)) as request:
        yield request
