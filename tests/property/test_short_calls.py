"""The short way of a call against the way of all calls: the same request, the same record, the same outcome."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any, Final, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shm_backend_utils.client import InferenceError, ShmClient
from shm_backend_utils.client.short import begin
from shm_backend_utils.client.steps import Short
from shm_backend_utils.errors import ShmError
from shm_backend_utils.protocol.parameters import GENERATION_PARAMETER, SLOT_PARAMETER, parse_address
from tests.unit.fake_server import Arrays, FakeServer, Order, config
from tests.unit.fake_wires import client_of

DTYPES: Final = {"TYPE_FP32": np.float32, "TYPE_INT64": np.int64, "TYPE_BOOL": np.bool_, "TYPE_STRING": np.object_}
SIZES: Final = st.sampled_from([0, 1, 2, 3, 3, 3, 5, 64])


class Model(NamedTuple):
    dtype: str
    dims: tuple[int, ...]
    most_rows: int
    tensors: int  # so many inputs, and outputs

    def config(self, name: str) -> dict[str, Any]:
        more = {"max_batch_size": self.most_rows} if self.most_rows else {}
        return config(name, dims=",".join(map(str, self.dims)), dtype=self.dtype, count=self.tensors, **more)


MODELS: Final = st.builds(
    Model,
    st.sampled_from([*DTYPES, "TYPE_FP32", "TYPE_FP32"]),
    st.lists(st.sampled_from([-1, -1, 3]), min_size=1, max_size=3).map(tuple),
    st.sampled_from([0, 0, 4]),
    st.integers(1, 2),
)


@st.composite
def arrays(draw: st.DrawFn, model: Model) -> Any:
    """Return an input: nearly always one that the model takes."""
    dims = [draw(st.just(size) | st.just(2)) if size == 3 else draw(SIZES) for size in model.dims]
    shape = (*([draw(st.integers(0, 5))] if model.most_rows else []), *dims)
    dtype: Any = draw(st.sampled_from([DTYPES[model.dtype]] * 9 + [np.float64]))
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    return draw(st.sampled_from([array] * 5 + [array.T.copy().T, np.asfortranarray(array), array.tolist()]))


@st.composite
def calls(draw: st.DrawFn, model: Model) -> tuple[dict[str, Any], Any]:
    """Return inputs and the outputs wanted, and how."""
    names = [f"IN{index}" for index in range(model.tensors)]
    one = draw(arrays(model))
    inputs = {name: one if draw(st.booleans()) else draw(arrays(model)) for name in draw(st.permutations(names))}
    if draw(st.integers(0, 9)) == 0:
        inputs.popitem()
    wanted = draw(st.permutations([f"OUT{index}" for index in range(model.tensors)]))[: draw(st.integers(0, 2))]
    hints = st.sampled_from([None, 0, 8, 24, 4096, -1, True, ((3,), np.float32), "cuda:x"])
    as_mapping = {name: draw(hints) for name in wanted}
    return inputs, draw(
        st.sampled_from([None, None, wanted, as_mapping, as_mapping, ["OUT0", "OUT0"], ["NONE"], "OUT0"])
    )


class Answers(NamedTuple):
    """How the model answers: in which order, and which mistakes it makes."""

    is_reversed: bool
    mistake: str

    def __call__(self, order: Order, inputs: Arrays) -> Arrays:
        if self.mistake == "error":
            raise InferenceError("the model fails", "StatusCode.INTERNAL")
        outputs = {name.replace("IN", "OUT"): array + array for name, array in inputs.items()}
        for name in order.outputs or ("OUT0",):
            outputs.setdefault(name, np.zeros(3, np.float32))
        first = next(iter(outputs))
        if self.mistake == "shape":
            outputs[first] = np.zeros((7, *outputs[first].shape), outputs[first].dtype)
        elif self.mistake == "larger":
            outputs[first] = np.concatenate([outputs[first]] * 3)
        elif self.mistake == "dtype":
            outputs[first] = outputs[first].astype(np.uint8)
        elif self.mistake == "missing" and order.outputs is None:
            del outputs[first]
        return dict(reversed(outputs.items())) if self.is_reversed else outputs


ANSWERS: Final = st.builds(
    Answers, st.booleans(), st.sampled_from(["", "", "", "shape", "larger", "dtype", "missing", "error"])
)


class Side:
    """A client and what it sends."""

    def __init__(self, protocol: str, is_short: bool, **named: Any) -> None:
        self.server = FakeServer()
        self.client = client_of(self.server, protocol, **named)
        if not is_short:
            self.client._most_bytes = -1  # type: ignore[misc]
        self.sent: list[Any] = []
        self.server.before = self._note

    def outcome(self, model: str, inputs: dict[str, Any], outputs: Any) -> Any:
        try:
            with self.client.infer(model, inputs, outputs=outputs) as result:
                told = {name: (array.dtype, array.shape, array.tolist()) for name, array in result.items()}
                ours = result.path, dict(result.overflowed), result.bytes_avoided, result.in_response
                are_writeable = all(array.flags.writeable for array in result.values())
                return list(result), told, ours, result.parameters, are_writeable
        except (ShmError, TypeError, ValueError) as error:
            return type(error), str(error)

    def stats(self) -> Any:
        stats = self.client.stats()
        return stats.requests, stats.failures, stats.paths, stats.bytes_avoided, stats.retries

    def close(self) -> None:
        self.client.close()
        self.server.close()

    def _note(self, order: Order) -> None:
        table = b""
        parameters = dict(order.parameters)
        if SLOT_PARAMETER in parameters:
            address = parse_address(parameters.pop(SLOT_PARAMETER))
            table = bytes(self.server._region(address.key, address.token).record(address.slot).request)
            table = table[8 : int.from_bytes(table[8:12], "little")]  # behind the generation, with its length in front
            del parameters[GENERATION_PARAMETER]
        inputs = {name: array.tolist() for name, array in order.inputs.items()}
        self.sent.append((order.model, parameters, inputs, order.outputs and list(order.outputs), table))


@pytest.mark.parametrize("protocol", ["grpc", "http"])
@pytest.mark.filterwarnings("ignore::shm_backend_utils.client.CopyWarning")
@pytest.mark.parametrize("named", [{}, {"inline_bytes": 0}, {"path": "inline"}], ids=str)
def test_both_ways_send_and_return_the_same(protocol: str, named: dict[str, Any]) -> None:
    short, general = (Side(protocol, is_short, **named) for is_short in (True, False))

    @given(st.data(), MODELS)
    def same(data: st.DataObject, model: Model) -> None:
        name = f"m{len(short.server.configs)}"
        for side in (short, general):
            side.server.configs[name] = model.config(name)
            side.sent.clear()
        for inputs, outputs in data.draw(st.lists(calls(model), min_size=2, max_size=6), "calls"):
            answers: Any = data.draw(ANSWERS, "answers")
            short.server.compute = general.server.compute = answers
            assert short.outcome(name, inputs, outputs) == general.outcome(name, inputs, outputs)
            assert short.sent == general.sent
        assert short.stats() == general.stats()

    with closing(short), closing(general):
        same()


@pytest.fixture
def client() -> Iterator[ShmClient]:
    server = FakeServer(config("m"), config("rows", max_batch_size=8, dynamic_batching={}))
    with server, client_of(server) as client:
        yield client


@pytest.mark.parametrize("outputs", [None, ["OUT0"], {"OUT0": None}, {"OUT0": 24}, {"OUT0": 4096}], ids=str)
@pytest.mark.parametrize("model", ["m", "rows"])
@pytest.mark.parametrize("path", ["auto", "direct", "inline"])
def test_most_calls_are_short(client: ShmClient, model: str, path: Any, outputs: Any) -> None:
    inputs = {"IN0": np.ones((1, 6), np.float32) if model == "rows" else np.ones(6, np.float32)}
    for _ in range(3):
        client.infer(model, inputs, outputs=outputs, path=path)
    core: Any = client._core
    settings = client._settings.of_call("infer", model, path, None, {})
    assert isinstance(begin(core, settings, inputs, outputs, np.inf), Short)
