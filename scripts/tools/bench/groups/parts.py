"""What is measured without a server: a request's own time part by part, on both sides, and a model harness.

The parts are measured warm, each by itself; and one after another when other memory was read before the first, as much
as the caches hold. A request finds the caches somewhere between: while a client waits, the server and the model work on
the same cores.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any, Final

import numpy as np

from shm_backend_utils.cli.common.sample_models import REPOSITORY
from shm_backend_utils.client import PoolOptions, ShmClient
from shm_backend_utils.client.inputs.descriptions import wanted_outputs
from shm_backend_utils.client.inputs.sources import sources
from shm_backend_utils.client.known_model import KnownModel
from shm_backend_utils.client.options import RequestOptions
from shm_backend_utils.client.paths.direct import result_of
from shm_backend_utils.client.settings import ClientSettings
from shm_backend_utils.client.transports.grpc.codec import GrpcCodec
from shm_backend_utils.client.transports.messages import OutputTensor, Request
from shm_backend_utils.memory.managed import ManagedRegion
from shm_backend_utils.memory.pool.need import Need
from shm_backend_utils.memory.pool.pool import SlotPool
from shm_backend_utils.memory.pool.slot import Slot, SlotRegion
from shm_backend_utils.model.call.admission import check_table
from shm_backend_utils.model.mapping.mapped import MappedRegion
from shm_backend_utils.model.mapping.mapped import Slot as MappedSlot
from shm_backend_utils.model_spec import ModelSpec
from shm_backend_utils.protocol import results, table
from shm_backend_utils.protocol.call_layout import CallLayout
from shm_backend_utils.protocol.results import OutputPlace
from shm_backend_utils.protocol.spans import Table
from shm_backend_utils.testing.harness import ModelHarness

from ...figures import Figure
from ..bench import Bench

Parts = Mapping[str, Callable[[], object]]

_CACHES_BYTES: Final = 32 * 2**20
_SPEC: Final = ModelSpec.from_config(
    {
        "name": "identity",
        "input": [{"name": "INPUT0", "data_type": "TYPE_FP32", "dims": [-1], "optional": True}],
        "output": [{"name": "OUTPUT0", "data_type": "TYPE_FP32", "dims": [-1]}],
    }
)
_X: Final = np.ones(256, np.float32)
_WANTED: Final = {"OUTPUT0": _X.nbytes}


class _Client:
    """What a client has in hand in the middle of a call."""

    def __init__(self, stack: ExitStack) -> None:
        self.pool = SlotPool(PoolOptions(max_bytes=2**22))
        stack.callback(self.pool.close)
        self.known = KnownModel(_SPEC, 1.0)
        self.layout: CallLayout = self.laid_out()
        self.need = Need(self.layout.end - self.known.data_begin)
        self.region, self.memory = self.pool.redeem(self.pool.request(self.need, "bench"))
        stack.callback(self._let_go)

    def laid_out(self) -> CallLayout:
        """Look at the inputs and the hints, and lay the call out."""
        given = sources(_SPEC, {"INPUT0": _X})
        return self.known.lay_out(given, wanted_outputs(_WANTED).byte_sizes)

    def _let_go(self) -> None:
        del self.memory


def parts(bench: Bench) -> list[Figure]:
    """Measure the parts of a request with one input and one output of 1 KiB."""
    with ExitStack() as stack:
        client = _Client(stack)
        of_infer = _measured(bench, "infer", _parts_of_infer(client))
        of_execute = _measured(bench, "execute", _parts_of_execute(client.region, client.layout.table))
    return [*of_execute, *of_infer]


def _parts_of_infer(client: _Client) -> Parts:
    settings, codec, memory = ClientSettings("localhost:8001", 60.0, "auto", None), GrpcCodec(), client.memory
    slot: Slot = client.region.slots[0]
    source = sources(_SPEC, {"INPUT0": _X})["INPUT0"]
    span = client.layout.table.inputs["INPUT0"]
    place = _place(client.layout.table)
    spare = SlotPool(PoolOptions(max_bytes=2**22))
    spare.redeem(spare.request(client.need, "bench"))  # and given back at once: it is idle now
    generations = itertools.count(1)

    def message() -> bytes:
        request = Request(
            "identity",
            (),
            [OutputTensor("OUTPUT0")],
            RequestOptions(),
            (slot.address_pattern % "identity", next(generations)),
        )
        encoded: bytes = codec.infer(request).request.SerializeToString()
        return encoded

    slot.record.complete(slot.begin(table.encode(client.layout.table)), results.encode([place]))
    return {
        "the call's settings": lambda: settings.of_call("infer", "identity", None, None, RequestOptions()),
        "inputs and hints looked at, laid out": client.laid_out,
        "a slot taken and given back": lambda: spare.take_idle(client.need, "bench"),
        "the input copied": lambda: source.write_to(np.ndarray(span.shape, np.float32, memory, span.offset)),
        "the table written": lambda: slot.begin(table.encode(client.layout.table)),
        "the message made and encoded": message,
        "the results copied and checked": lambda: results.decode(slot.copy_results(), [client.region.byte_size]),
        "the result made": lambda: result_of([place], memory, (), lambda: None),
    }


def _parts_of_execute(region: SlotRegion, said: Table) -> Parts:
    managed = ManagedRegion.open(region.key, region.token, "the region of the bench")
    mapped = MappedSlot(MappedRegion(managed), 0)
    memory, record, lease = mapped.memory, mapped.record, mapped.lease
    address = region.slots[0].address_pattern % "identity"
    parameters = json.dumps({"shm_slot": address, "shm_generation": 123456})
    data, place = bytes(record.request), _place(said)
    slots = {address: mapped}

    def views() -> None:
        for span, writable in ((said.inputs["INPUT0"], False), (place, True)):
            view = memory.view("X", span.offset, span.byte_size, span.dtype, span.shape, writable=writable)
            assert view is not None
            view.numpy()

    def leased() -> None:
        lease.take()
        lease.give_back()

    return {
        "parameters read, slot found": lambda: slots.get(json.loads(parameters)["shm_slot"]),
        "fstat": lambda: os.fstat(managed.segment.fileno()),
        "the lease taken and given back": leased,
        "the table copied and checked": lambda: table.decode(bytes(data), managed.data_offset, region.byte_size),
        "the table compared with the configuration": lambda: check_table(_SPEC, said, (memory,)),
        "two views, and arrays of them": views,
        "the results written": lambda: record.complete(1, results.encode([place])),
    }


def _place(said: Table) -> OutputPlace:
    span, room = said.inputs["INPUT0"], said.outputs["OUTPUT0"]
    return OutputPlace("OUTPUT0", span.dtype, span.shape, 0, room.offset, span.byte_size, False)


def _measured(bench: Bench, where: str, each: Parts) -> list[Figure]:
    other = np.ones(_CACHES_BYTES // 8)
    warm: dict[str, list[float]] = {name: [] for name in each}
    cold: dict[str, list[float]] = {name: [] for name in each}
    for _ in bench.shown(f"parts of {where}", bench.amounts.rounds):
        for name, part in each.items():
            part()
            warm[name] += _timed(part)
        other.sum()
        for name, part in each.items():
            cold[name] += _timed(part)
    figures = [
        Figure(
            f"part of {where}: {name}",
            statistics.median(warm[name]),
            "µs, warm",
            f"{statistics.median(cold[name]):.1f} µs, cold",
        )
        for name in each
    ]
    total = sum(figure.figure for figure in figures)
    cold_total = sum(statistics.median(times) for times in cold.values())
    basis = f"{cold_total:.1f} µs, cold"
    return [*figures, Figure(f"parts of {where}, together", total, "µs, warm", basis)]


def _timed(part: Callable[[], Any]) -> Iterator[float]:
    begin = time.perf_counter()
    part()
    yield (time.perf_counter() - begin) * 1e6


LEAST_REQUESTS: Final = 5_000
_MODEL: Final = REPOSITORY / "identity"
_REQUESTS: Final = 5_000
_ROUNDS: Final = 5


def harness(bench: Bench) -> list[Figure]:
    """Count the requests of a thread that calls the sample model ``identity``, with its session, by ``infer``."""
    del bench  # there is no server to measure against
    inputs = {"INPUT0": np.arange(4, dtype=np.float32)}
    with ModelHarness(_MODEL) as model:
        alone = max(_rate(lambda: model.infer(inputs)) for _ in range(_ROUNDS))
        with ShmClient(model, inline_bytes=0) as client:
            outputs = {"OUTPUT0": inputs["INPUT0"].nbytes}
            direct = max(
                _rate(lambda: client.infer("identity", inputs, outputs=outputs).release()) for _ in range(_ROUNDS)
            )
    basis = f"best of {_ROUNDS} times {_REQUESTS}, one thread"
    return [
        Figure("ModelHarness.infer, with a session", alone, "requests / s", basis, at_least=LEAST_REQUESTS),
        Figure("ShmClient of a harness, direct", direct, "requests / s", basis),
    ]


def _rate(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    for _ in range(_REQUESTS):
        work()
    return round(_REQUESTS / (time.perf_counter() - started))
