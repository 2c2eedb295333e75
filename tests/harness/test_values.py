"""One contract of values: the same elements, shapes and writability on every path and by every entry, or one error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest

from shm_backend_utils import dtypes
from shm_backend_utils.client import InferenceError, Result, ShmClient
from shm_backend_utils.client.options import PathName
from shm_backend_utils.compat.registered_model import RegisteredModel
from shm_backend_utils.errors import CallerError, TensorError
from shm_backend_utils.model.mapping import resolver
from shm_backend_utils.testing.harness import ModelHarness

from .conftest import SWEEP_INTERVAL_S
from .kinds_of_values import KINDS, ROWS

MODEL: Final = """
from shm_backend_utils.model import ShmSession
from tests.harness.kinds_of_values import KINDS

class TritonPythonModel:
    def initialize(self, args):
        self.session = ShmSession.from_args(args)

    def execute(self, requests):
        return getattr(self.session, "METHOD")(requests, self.infer)

    def infer(self, call):
        said = call.calls[0].parameters if "METHOD" == "serve_batch" else call.parameters
        how, kind = said.get("how"), said.get("kind")
        for name in KINDS:
            if call.requested(name):
                view = call.input(name)
                assert not view.writable
                value = KINDS[name][kind].make() if kind else view
                if how == "forward":
                    value = call.forward("serve", {name: value}, {name: None}.keys())[name]
                    assert not value.writable
                if how == "output" and name != "BYTES":
                    call.output(name, view.shape, view.dtype).numpy()[...] = view
                else:
                    call.put(name, value)
        return (None,)  # which is one response of a stream

    def finalize(self):
        self.session.close()
"""
PATHS: Final[tuple[PathName, ...]] = ("direct", "triton-shm", "inline")


def config(max_batch_size: int, more: str = "") -> str:
    """Return a configuration with a tensor of each data type, of its name."""
    tensors = [f'name: "{name}" data_type: TYPE_{"STRING" if name == "BYTES" else name} dims: [ -1 ]' for name in KINDS]
    inputs = [f"{tensor} optional: true" for tensor in [*tensors, 'name: "SHM" data_type: TYPE_UINT8 dims: [ -1 ]']]
    listed = [f"input [ {{ {each} }} ]" for each in inputs] + [f"output [ {{ {each} }} ]" for each in tensors]
    paths = 'parameters { key: "SHM_PATHS" value: { string_value: "direct,triton-shm,inline" } }'
    return "\n".join(['backend: "python"', f"max_batch_size: {max_batch_size}", paths, more, *listed])


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelHarness]:
    """Models that pass each input on: as it is, or as the parameters ``how`` and ``kind`` say."""
    configs = {
        "serve": config(8),
        "serve_batch": config(8, "dynamic_batching { }"),
        "serve_streams": config(8, "model_transaction_policy { decoupled: true }"),
        "in_twos": config(2),
        "forwarding": config(8),
    }
    folder = tmp_path_factory.mktemp("values")
    for name, text in configs.items():
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "config.pbtxt").write_text(text)
        method = name if name.startswith("serve") else "serve"
        (folder / name / "1" / "model.py").write_text(MODEL.replace("METHOD", method))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resolver, "SWEEP_INTERVAL_S", SWEEP_INTERVAL_S)
        with ModelHarness(*(folder / name for name in configs)) as harness:
            with ShmClient(harness) as client:  # so that the model that forwards has its own memory
                large = np.tile(ROWS, (1, 8192))
                PUT["forward"](client, "FP32", large, {"kind": "large array", "outputs": ["FP32"]})
            yield harness


@pytest.fixture
def client(harness: ModelHarness) -> Iterator[ShmClient]:
    with ShmClient(harness, inline_bytes=0) as client:
        yield client


Entry = Callable[[ShmClient, str, Any, dict[str, Any]], Any]


def stream_of(client: ShmClient, name: str, value: Any, named: dict[str, Any]) -> Any:
    path = "inline" if named["path"] == "triton-shm" else named["path"]
    (result,) = client.stream("serve_streams", {name: value}, **{**named, "path": path})
    return result


GIVE: Final[dict[str, Entry]] = {
    "infer": lambda client, name, value, named: client.infer("serve", {name: value}, **named),
    "submit": lambda client, name, value, named: client.submit("serve", {name: value}, **named).result(),
    "split": lambda client, name, value, named: client.infer("in_twos", {name: value}, split=True, **named),
    "batch": lambda client, name, value, named: client.infer("serve_batch", {name: value}, **named),
    "stream": stream_of,
}
"""Every way in which a client gives a value."""


def prepared(client: ShmClient, name: str, value: Any, named: dict[str, Any]) -> Any:
    with client.prepare("serve", {name: (value.shape, "S9" if name == "BYTES" else value.dtype)}, **named) as call:
        call.inputs[name][...] = value
        return call.infer()


def put(model: str, how: str = "") -> Entry:
    """Return how a model gives a value that it makes itself; the client gives it what arrives then."""

    def infer(client: ShmClient, name: str, value: Any, named: dict[str, Any]) -> Any:
        parameters = {"how": how, "kind": named.pop("kind", "")}
        if model == "serve_streams":
            return stream_of(client, name, value, {**named, "parameters": parameters})
        return client.infer(model, {name: value}, parameters=parameters, **named)

    return infer


PUT: Final[dict[str, Entry]] = {
    "put": put("serve"),
    "put of a batch": put("serve_batch"),
    "put of a stream": put("serve_streams"),
    "forward": put("forwarding", "forward"),
}
"""Every way in which a model gives a value."""
REFUSED: Final = [(name, kind) for name in KINDS for kind, each in KINDS[name].items() if isinstance(each.arrives, str)]
ARRIVE: Final = [(name, kind) for name in KINDS for kind in KINDS[name] if (name, kind) not in REFUSED]


def check(given: Any, name: str, expected: npt.NDArray[Any]) -> None:
    """Check what a call has of an output, and let go of it."""
    with given as result:
        (found,) = result.values()
        assert (type(found), found.dtype, found.shape) == (np.ndarray, dtypes.BY_NAME[name].numpy, expected.shape)
        assert found.tolist() == expected.tolist()
        assert {type(element) for element in found.flat} <= {bytes} or name != "BYTES"
        assert found.flags.writeable
        assert found.flags.c_contiguous


@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
@pytest.mark.parametrize(("name", "kind"), ARRIVE)
def test_a_value_arrives_as_it_is(client: ShmClient, name: str, kind: str) -> None:
    make, arrives = KINDS[name][kind]
    assert not isinstance(arrives, str)
    exact = arrives.astype(dtypes.BY_NAME[name].numpy)
    for path in PATHS:
        for give in GIVE.values():
            check(give(client, name, make(), {"path": path, "outputs": [name]}), name, exact)
        for give in (prepared, put("serve", "output")):
            check(give(client, name, exact, {"path": path, "outputs": [name]}), name, exact)
        for give in PUT.values():
            check(give(client, name, exact, {"path": path, "outputs": [name], "kind": kind}), name, exact)


@pytest.mark.parametrize(("name", "kind"), REFUSED)
def test_a_value_that_cannot_arrive_is_refused_in_the_same_words(client: ShmClient, name: str, kind: str) -> None:
    make, text = KINDS[name][kind]
    one = np.zeros((1, 1), "S1" if name == "BYTES" else dtypes.BY_NAME[name].numpy)
    for path in PATHS:
        for give in GIVE.values():
            with pytest.raises(TensorError, match=f"tensor '{name}' .*{text}") as refused:
                give(client, name, make(), {"path": path, "outputs": [name]})
            assert refused.value.tensor == name
        for give in PUT.values():
            with pytest.raises(InferenceError, match=f"tensor '{name}' .*{text}"):
                give(client, name, one, {"path": path, "outputs": [name], "kind": kind})


@pytest.fixture
def registered(harness: ModelHarness) -> Iterator[RegisteredModel]:
    declared = [("FP32", (4,), np.float32)]
    model = RegisteredModel(harness.connect(), "serve", declared, declared, 8, 1)
    yield model
    model.close()


@pytest.mark.parametrize("kind", ["array", "big-endian", "not contiguous", "list of rows", "nested lists of numbers"])
def test_rows_of_a_registered_model_arrive_as_they_are(registered: RegisteredModel, kind: str) -> None:
    found = registered.infer({"FP32": KINDS["FP32"][kind].make()}, None, {})["FP32"]
    check(Result({"FP32": found}, "", dict), "FP32", ROWS)


NAMED: Final[dict[str, Any]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "generator": iter,
    "keys": lambda names: dict.fromkeys(names).keys(),
    "mapping": dict.fromkeys,
    "array": np.array,
    "twice": lambda names: [*names, *names],
}


@pytest.mark.parametrize("kind", NAMED)
def test_outputs_are_named_by_whatever_has_names(client: ShmClient, kind: str) -> None:
    inputs = {"FP32": ROWS, "INT8": ROWS.astype(np.int8)}
    for path in PATHS:
        for model in ("serve", "in_twos"):
            named = NAMED[kind](["INT8", "FP32"])
            with client.infer(model, inputs, outputs=named, path=path, split=model == "in_twos") as result:
                assert list(result) == ["FP32", "INT8"]  # as the configuration has them


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("empty", [[], {}, set(), iter(()), np.array([])], ids=lambda empty: type(empty).__name__)
def test_to_name_no_output_is_an_error(client: ShmClient, path: PathName, empty: Any) -> None:
    named: dict[str, Any] = {"outputs": empty, "path": path}
    for use in (
        lambda: client.infer("serve", {"FP32": ROWS}, **named),
        lambda: client.infer("in_twos", {"FP32": ROWS}, split=True, **named),
        lambda: client.submit("serve", {"FP32": ROWS}, **named),
        lambda: client.prepare("serve", {"FP32": ((1, 2), "f4")}, **named),
        lambda: next(client.stream("serve_streams", {"FP32": ROWS}, **named)),
    ):
        with pytest.raises(CallerError, match="outputs is empty; .* leave it out for all"):
            use()


def test_more_than_a_message_carries_is_refused_before_it_is_copied(client: ShmClient) -> None:
    inputs = {"UINT8": np.broadcast_to(np.uint8(1), (8, 2**28))}
    with pytest.raises(TensorError, match="2,147,483,648 bytes, but a message carries less than 2 GiB; make several"):
        client.infer("serve", inputs, outputs=["FP32"], path="inline")
    most = (8, 2**28 - 2**17)  # of memory that nobody touches
    client.prepare("serve", {"UINT8": (most, np.uint8)}, outputs=["FP32"], path="inline").close()
