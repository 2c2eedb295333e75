"""The class of triton-shm-client and the one that replaces it, side by side: the same calls, results, and ends."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest
import tritonclient.grpc

from shm_backend_utils.compat.triton_shm_client import TritonSHMClient
from shm_backend_utils.server import EmbeddedServer
from tests.releases import names_sequences, takes_floats

from .two_classes import CLASSES, ORDINARY, ROWS, Call, Declared, x_of


def rows(x: Any, **named: Any) -> Call:
    return Call(ROWS, {"X": x}, named)


def ordinary(x: Any, n: Any, **named: Any) -> Call:
    return Call(ORDINARY, {"X": x, "N": n}, named)


def n_of(count: int) -> npt.NDArray[np.int64]:
    return np.arange(count)[:, np.newaxis]


def add_sub(count: int, max_batch_size: int) -> Call:
    tensors = [("INPUT0", (16,), np.int32), ("INPUT1", (16,), np.int32)]
    outputs = [("OUTPUT0", (16,), np.int32), ("OUTPUT1", (16,), np.int32)]
    a, b = np.random.default_rng(count).integers(-1000, 1000, (2, count, 16), np.int32)
    return Call(Declared("add_sub", tensors, outputs, max_batch_size), {"INPUT0": a, "INPUT1": b})


def multiply(count: int) -> Call:
    images = np.random.default_rng(count).random((count, 3, 224, 224), np.float32)
    shape = (3, 224, 224)
    declared = Declared("multiply", [("INPUT0", shape, np.float32)], [("OUTPUT0", shape, np.float32)], 2)
    return Call(declared, {"INPUT0": images})


CALLS = {
    "one batch and a row": rows(x_of(5)),
    "more batches than the pool has room for": rows(x_of(99)),
    "several batches of two inputs": ordinary(x_of(10), n_of(10)),
    "batches smaller than the model's": add_sub(20, 3),
    "a list of numbers, each repeated": rows([1, 2, 3, 4, 5]),
    "strings of numbers": rows(np.array([["1", "2", "3", "4.5"]])),
    "fractions cast to whole numbers": ordinary(x_of(3), np.array([[1.9], [2.9], [-3.9]])),
    "an output as a flat one of bytes": Call(ROWS.reading(("DOUBLED", (16,), np.uint8)), {"X": x_of(6)}),
    "an output of the model left out": Call(
        ORDINARY.reading(("Y", (4,), np.float32)), ordinary(x_of(5), n_of(5)).inputs
    ),
    "outputs in another order": Call(
        ORDINARY.reading(("SUM", (1,), np.int64), ("Y", (4,), np.float32)), ordinary(x_of(5), n_of(5)).inputs
    ),
    "no outputs": Call(ROWS.reading(), {"X": x_of(5)}),
    "request_id": rows(x_of(5), request_id="seven"),
    "a sequence by number": rows(x_of(1), sequence_id=7, sequence_start=True, sequence_end=True),
    "a sequence by name": rows(x_of(1), sequence_id="seven", sequence_start=True),
    "timeout": rows(x_of(5), timeout=10_000_000),
    "headers": rows(x_of(5), headers={"x-word": "seven"}),
    "a compression that there is not": rows(x_of(5), compression_algorithm="zip"),
    "parameters": Call(ROWS.reading(("REPEATED", (12,), np.float32)), {"X": x_of(5)}, {"parameters": {"times": 3}}),
    "parameters of every kind": rows(x_of(5), parameters={"a": 1, "b": True, "c": "d", "e": 1.5}),
    "model_version": rows(x_of(5), model_version="1"),
}


def assert_same(ours: dict[str, npt.NDArray[Any]], theirs: dict[str, npt.NDArray[Any]]) -> None:
    assert type(ours) is dict
    assert list(ours) == list(theirs)
    for name, array in theirs.items():
        assert (ours[name].shape, ours[name].dtype) == (array.shape, array.dtype)
        assert ours[name].tobytes() == array.tobytes()  # bytes, as NaN is not equal to itself


NEWER: Final = {"a sequence by name": names_sequences, "parameters of every kind": takes_floats}


@pytest.mark.parametrize(
    "call", [pytest.param(call, id=name, marks=NEWER.get(name, ())) for name, call in CALLS.items()]
)
def test_both_give_the_same(triton_server: EmbeddedServer, call: Call) -> None:
    ours, theirs = (call.made_by(CLASSES[name], triton_server) for name in ("ours", "theirs"))
    assert_same(ours, theirs)


def test_results_are_the_callers_own(triton_server: EmbeddedServer) -> None:
    with TritonSHMClient(triton_server.grpc_url) as client:
        ROWS.register(client)
        first = client.infer_shm("rows", {"X": x_of(10)})["DOUBLED"]
        client.infer_shm("rows", {"X": x_of(10) + 1})
    assert first.flags.owndata
    assert first.flags.writeable
    np.testing.assert_array_equal(first, x_of(10) * 2)


@pytest.mark.parametrize("kind", CLASSES.values(), ids=CLASSES.keys())
def test_the_originals_example(triton_server: EmbeddedServer, kind: Any, capsys: pytest.CaptureFixture[str]) -> None:
    readme = distribution("triton-shm-client").read_text("METADATA")
    assert readme is not None
    example = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)[0]
    for old, new in (
        ("from triton_shm_client import TritonSHMClient", f"from {kind.__module__} import TritonSHMClient"),
        ("localhost:8001", triton_server.grpc_url),
        ("my_model", "pictures"),
    ):
        assert old in example
        example = example.replace(old, new)
    np.random.seed(7)
    names: dict[str, Any] = {}
    exec(example, names)
    names["client"].close()
    np.random.seed(7)
    pictures = np.random.randn(100, 3, 224, 224).astype(np.float32)
    numbers = np.random.randint(0, 100, size=(100, 10)).astype(np.int32)
    assert capsys.readouterr().out == "Output shape: (100, 512)\n"
    np.testing.assert_array_equal(names["results"]["OUTPUT0"], pictures.reshape(100, -1)[:, :512])
    np.testing.assert_array_equal(
        names["results"]["OUTPUT1"], numbers[:, :5] + numbers.sum(axis=1, keepdims=True, dtype=np.int32)
    )


# What every program begins with: a client with a model of each kind, which has called them.
BEGIN = """
import os, signal, sys, threading, time
import numpy as np
from shm_backend_utils.client import ForkedError
from shm_backend_utils.compat.triton_shm_client import InferShmError, TritonSHMClient

client = TritonSHMClient(sys.argv[1])
client.register_shm_model("rows", [("X", (4,), np.float32)], [("DOUBLED", (4,), np.float32)], 4, 2)
client.register_shm_model(
    "ordinary", [("X", (4,), np.float32), ("N", (1,), np.int64)], [("Y", (4,), np.float32)], 4, 2
)

def infer(count=10):
    x = np.arange(4 * count, dtype=np.float32).reshape(count, 4)
    rows = client.infer_shm("rows", {"X": x})["DOUBLED"]
    ordinary = client.infer_shm("ordinary", {"X": x, "N": np.full((count, 1), 2)})["Y"]
    assert np.array_equal(rows, 2 * x) and np.array_equal(ordinary, 2 * x)

infer()

def in_child(work):
    child = os.fork()
    if child == 0:
        work()
        sys.exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def is_refused(count):
    try:
        infer(count)
    except InferShmError as error:
        assert isinstance(error.__cause__, ForkedError), repr(error.__cause__)
    else:
        sys.exit("no error")
"""

ENDS = {
    "is interrupted, then exits": """
client.register_shm_model("late_writer", [("VALUE_AND_DELAY_US", (), np.int64)], [("VALUES", (256,), np.int64)], 2, 2)
signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background may have it ignored
threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    client.infer_shm("late_writer", {"VALUE_AND_DELAY_US": [1, 600_000] * 4})
except KeyboardInterrupt:
    infer()
else:
    sys.exit("no interrupt")
""",
    "forks while all memory is in use, and the child calls": """
assert in_child(lambda: is_refused(10)) == 0
holders = [threading.Thread(target=infer, args=(2000,)) for _ in range(4)]
for holder in holders:
    holder.start()
assert in_child(lambda: is_refused(1)) == 0
for holder in holders:
    holder.join()
infer()
""",
    "forks, and the child cleans up": """
assert in_child(client.cleanup_all_shm) == 0
infer()
""",
}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS.keys())
def test_it_leaves_nothing(triton_server: EmbeddedServer, end: str) -> None:
    url = triton_server.grpc_url
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", BEGIN + end, url]
    with subprocess.Popen(command) as process:
        assert process.wait(60) == 0
    with tritonclient.grpc.InferenceServerClient(url) as client:
        known = client.get_system_shared_memory_status(as_json=True).get("regions", {})
    prefix = f"shmbu-{process.pid}-"
    assert [name for name in known if name.startswith(prefix)] == []
    assert list(Path("/dev/shm").glob(f"{prefix}*")) == []
