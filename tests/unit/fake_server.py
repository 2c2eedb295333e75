"""A server in this process behind a client's transport: everything of the client but the network is real."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from shm_backend_utils import dtypes
from shm_backend_utils.client.errors import InferenceError, deadline_exceeded
from shm_backend_utils.dtypes import BYTES
from shm_backend_utils.errors import ReplayedRequestError, StaleRequestError, TableError, refusal
from shm_backend_utils.memory.managed import ManagedRegion
from shm_backend_utils.memory.segment import SystemSegment
from shm_backend_utils.protocol import layout, results, table
from shm_backend_utils.protocol.handover import parse_sealed_key
from shm_backend_utils.protocol.parameters import (
    GENERATION_PARAMETER,
    SLOT_PARAMETER,
    SlotAddress,
    parse_address,
    parse_generation,
)
from shm_backend_utils.protocol.results import NO_RESULTS, OutputPlace
from shm_backend_utils.protocol.spans import OutputSpan, Table, frame_number
from shm_backend_utils.tensors.strings import Strings
from tests.opened import open_region, open_segment

Arrays = dict[str, npt.NDArray[Any]]
Compute = Callable[["Order", Arrays], Any]


@dataclass
class Order:
    model: str
    version: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)  # in Python's types
    headers: dict[str, str] = field(default_factory=dict)
    # Arrays that travelled, or (key, offset, byte_size, dtype, shape) of registered memory.
    inputs: dict[str, Any] = field(default_factory=dict)
    # Those wanted, with their place in registered memory; None for all.
    outputs: dict[str, tuple[str, int, int] | None] | None = None


def doubled(_: Order, inputs: Arrays) -> Arrays:
    return {name.replace("IN", "OUT"): array + array for name, array in inputs.items()}


def config(name: str, *, dims: str = "-1", dtype: str = "TYPE_FP32", count: int = 1, **more: Any) -> dict[str, Any]:
    """Return the configuration of a model with inputs ``IN0`` … and outputs ``OUT0`` …, on every path."""
    tensors = [{"data_type": dtype, "dims": dims.split(",")} for _ in range(count)]
    inputs: list[dict[str, Any]] = [
        {"name": f"IN{index}", "optional": True, **each} for index, each in enumerate(tensors)
    ]
    if more.get("max_batch_size"):
        inputs.append({"name": "SHM", "data_type": "TYPE_UINT8", "dims": ["-1"], "optional": True})
    return {
        "name": name,
        "input": inputs,
        "output": [{"name": f"OUT{index}", **each} for index, each in enumerate(tensors)],
        "parameters": {"SHM_PATHS": {"string_value": "direct,triton-shm,inline"}},
        **more,
    }


class FakeServer(contextlib.AbstractContextManager["FakeServer"]):
    def __init__(self, *configs: dict[str, Any], compute: Compute = doubled) -> None:
        self.configs = {each["name"]: each for each in configs}  # which a test may change
        self.compute = compute
        self.orders: list[Order] = []  # every request for inference so far
        # Called with each order: before anything is looked at, when it may raise or wait; and when all is written.
        self.before: Callable[[Order], object] = lambda order: None
        self.after: Callable[[Order], object] = lambda order: None
        self.registered: dict[str, SystemSegment] = {}
        self.version = "2.73.0"
        self._mapped: dict[tuple[str, str], ManagedRegion] = {}
        self._process = os.getpid()
        self._lock = threading.Lock()
        self.frame_limit_s = 5.0
        self.is_live = self.is_ready = True  # as it says itself
        self.loads: list[tuple[str, dict[str, Any]]] = []  # models that were to be loaded, and by which parameters
        self.unloads: list[tuple[str, bool]] = []  # those to be unloaded, and whether with their dependents

    def config(self, name: str) -> dict[str, Any]:
        if name not in self.configs:
            raise InferenceError(f"Request for unknown model: '{name}' is not found", "StatusCode.NOT_FOUND")
        return self.configs[name]

    def metadata(self, name: str) -> dict[str, Any]:
        """Return what it says of a model's versions, or of itself if the name is empty."""
        if not name:
            return {"name": "fake", "version": self.version, "extensions": ["model_repository"]}
        return {"name": self.config(name)["name"], "versions": ["1"]}

    def register(self, name: str, key: str, byte_size: int) -> None:
        if name in self.registered:
            raise InferenceError(f"shared memory region '{name}' already in manager", "StatusCode.ALREADY_EXISTS")
        self.registered[name] = open_segment(key.removeprefix("/"), byte_size, "region")

    def unregister(self, name: str) -> None:
        segment = self.registered.pop(name, None)
        if segment is not None:
            segment.close()

    def infer(self, order: Order) -> Arrays:
        self._refuse_trial(order)
        self.orders.append(order)
        self.before(order)
        if SLOT_PARAMETER in order.parameters:
            outputs = self._in_slot(order)
        else:
            outputs = self._placed(
                order, self.compute(order, {name: self._read(given) for name, given in order.inputs.items()})
            )
        self.after(order)
        return outputs

    def stream(self, order: Order) -> Iterator[Arrays]:
        """Execute an order to a decoupled model: ``compute`` gives the outputs of one frame after another."""
        self._refuse_trial(order)
        self.orders.append(order)
        if SLOT_PARAMETER not in order.parameters:
            yield from self.compute(order, {name: self._read(given) for name, given in order.inputs.items()})
            return
        region, record, generation, contents = self._begin(order)
        inputs = self._inputs(region, contents)
        assert contents.ring is not None
        ring = contents.ring
        try:
            for index, outputs in enumerate(self.compute(order, inputs)):
                place = index % ring.frames
                frame = region.record(ring.slot + place)
                if index >= ring.frames:
                    self._wait_for(frame, frame_number(generation, index - ring.frames))
                rooms = ring.outputs(contents.outputs, place)
                written, travelling = _written(region, rooms, outputs)
                frame.complete(frame_number(generation, index), results.encode(written))
                yield travelling
        finally:
            if os.getpid() == self._process:  # a forked child has no server
                record.complete(generation, NO_RESULTS)

    def close(self) -> None:
        for region in self._mapped.values():
            region.close()
        for segment in self.registered.values():
            segment.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wait_for(self, frame: layout.SlotRecord, number: int) -> None:
        pause, waited_s = threading.Event(), 0.0
        while frame.generation < number:
            pause.wait(0.001)
            waited_s += 0.001
            if waited_s > self.frame_limit_s:
                raise deadline_exceeded()  # the client's own patience, as nothing runs beside it here

    def _refuse_trial(self, order: Order) -> None:
        """Open sealed memory in which no request was ever begun, and say so, as models do; it counts as no order."""
        with contextlib.suppress(TableError, KeyError):
            address = parse_address(order.parameters[SLOT_PARAMETER])
            if parse_sealed_key(address.key) is not None:
                with contextlib.closing(open_region(address.key, address.token)) as region:
                    if region.record(address.slot).generation == 0:
                        raise InferenceError(refusal(StaleRequestError("none was begun")))

    def _begin(self, order: Order) -> tuple[ManagedRegion, layout.SlotRecord, int, Table]:
        address = parse_address(order.parameters[SLOT_PARAMETER])
        generation = parse_generation(order.parameters[GENERATION_PARAMETER])
        assert address.model == order.model
        region = self._region(address.key, address.token)
        record = region.record(address.slot)
        found, contents = table.decode(bytes(record.request), region.data_offset, region.header.byte_size)
        if found != generation:
            raise InferenceError(refusal(StaleRequestError("another generation")))
        if record.started == generation:
            raise InferenceError(refusal(ReplayedRequestError("a second time")))
        record.model_words[0] = generation
        return region, record, generation, contents

    def _in_slot(self, order: Order) -> Arrays:
        try:
            address = parse_address(order.parameters[SLOT_PARAMETER])
        except TableError as error:
            raise InferenceError(refusal(error)) from None
        with self._leased(address):
            region, record, generation, contents = self._begin(order)
            encoded = NO_RESULTS
            try:
                outputs = self.compute(order, self._inputs(region, contents))
                rooms = contents.outputs
                wanted = outputs if order.outputs is None else {name: outputs[name] for name in order.outputs}
                written, travelling = _written(region, rooms, wanted)
                encoded = results.encode(written)
            finally:
                record.complete(generation, encoded)
            return travelling

    @contextlib.contextmanager
    def _leased(self, address: SlotAddress) -> Iterator[None]:
        lease = self._region(address.key, address.token).lease(address.slot)
        deadline = time.monotonic() + 10
        while not lease.take():  # a request that was given up finds out with the lease in its hands
            assert time.monotonic() < deadline, "somebody else executes in this slot"
            time.sleep(0.0001)
        try:
            yield
        finally:
            lease.give_back()

    def _region(self, key: str, token: str) -> ManagedRegion:
        with self._lock:
            for known, mapped in list(self._mapped.items()):
                if mapped.segment.is_unlinked:
                    self._mapped.pop(known).close()
            if (key, token) not in self._mapped:
                self._mapped[key, token] = open_region(key, token, "region")
            return self._mapped[key, token]

    def _inputs(self, region: ManagedRegion, contents: Table) -> Arrays:
        memory = region.bytes()
        found: Arrays = {}
        for name, span in contents.inputs.items():
            raw = memory[span.offset : span.offset + span.byte_size]
            found[name] = (
                Strings.encoded_as(name, raw, span.shape).numpy()
                if span.dtype is BYTES
                else raw.view(span.dtype.numpy).reshape(span.shape)
            )
        return found

    def _read(self, given: Any) -> npt.NDArray[Any]:
        if isinstance(given, np.ndarray):
            return given
        name, offset, byte_size, datatype, shape = given
        memory = np.frombuffer(self._known(name).buffer(), np.uint8)[offset : offset + byte_size]
        array: npt.NDArray[Any] = memory.view(dtypes.BY_NAME[datatype].numpy).reshape(shape)
        return array

    def _known(self, name: str) -> SystemSegment:
        if name not in self.registered:
            raise InferenceError(f"Unable to find shared memory region: '{name}'", "StatusCode.NOT_FOUND")
        return self.registered[name]

    def _placed(self, order: Order, outputs: Arrays) -> Arrays:
        wanted: Mapping[str, Any] = dict.fromkeys(outputs) if order.outputs is None else order.outputs
        travelling: Arrays = {}
        for name, place in wanted.items():
            array = outputs[name]
            travelling[name] = array
            if place is not None:
                region, offset, room = place
                if array.nbytes > room:
                    raise InferenceError(f"output '{name}': {room} bytes should be at least {array.nbytes} bytes")
                memory = np.frombuffer(self._known(region).buffer(), np.uint8)
                memory[offset : offset + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        return travelling


def _written(own: ManagedRegion, rooms: Mapping[str, OutputSpan], outputs: Arrays) -> tuple[list[OutputPlace], Arrays]:
    places, travelling = [], {}
    for name, array in outputs.items():
        dtype = dtypes.from_numpy(array.dtype, name)
        data = (
            Strings.of(name, array).encoded
            if dtype is BYTES
            else np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        )
        room = rooms.get(name)
        if room is None or room.byte_size < data.nbytes:
            travelling[name] = data if dtype is BYTES else array
            places.append(OutputPlace(name, dtype, array.shape, 0, 0, 0, is_in_response=True))
            continue
        own.bytes()[room.offset : room.offset + data.nbytes] = data
        places.append(
            OutputPlace(name, dtype, array.shape, room.region, room.offset, data.nbytes, is_in_response=False)
        )
    return places, travelling
