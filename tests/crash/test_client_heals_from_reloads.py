"""A model gets another configuration, or goes away and comes back, under clients that have called it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from shm_backend_utils.client import InferenceError, PathUnavailableError
from shm_backend_utils.client.options import PathName
from shm_backend_utils.errors import BatchSizeError, TensorShapeError, TensorTypeError
from tests.releases import outlives_models

from ..e2e.flavours import FLAVOURS, TWO_FLAVOURS, AnyCall, AnyClient, client_of, url_of
from ..e2e.loading_server import LoadingServer, side_by_side
from .processes import kill_stub
from .servers import ONCE

Case = tuple[str, PathName]
PATHS: tuple[PathName, ...] = ("direct", "triton-shm", "inline")


class Mirror(LoadingServer):
    """A server, and models that it may load. Each passes X on as Y."""

    def configure(
        self,
        name: str,
        *,
        dims: tuple[int, ...] = (-1,),
        dtype: str = "FP32",
        max_batch_size: int = 0,
        paths: str = ",".join(PATHS),
    ) -> None:
        tensor = {"data_type": f"TYPE_{dtype}", "dims": dims}
        carrier = {"name": "SHM", "data_type": "TYPE_UINT8", "dims": [-1], "optional": True}
        config = {
            "backend": "python",
            "max_batch_size": max_batch_size,
            "input": [{"name": "X", "optional": True, **tensor}, *([carrier] if max_batch_size else [])],
            "output": [{"name": "Y", **tensor}],
            "parameters": {"SHM_PATHS": {"string_value": paths}},
            "instance_group": [{"kind": "KIND_CPU"}],
        }
        self.copy(name, "direct_only")
        self.grpc.load_model(name, config=json.dumps(config))

    def configure_all(self, configs: Mapping[str, Mapping[str, Any]]) -> None:
        """Load models side by side, as each load is spent in waiting."""
        side_by_side(lambda name: self.configure(name, **configs[name]), configs)


@dataclass(frozen=True)
class Change:
    """Two configurations; what only the first takes, what the second takes, and the error for the former then."""

    before: dict[str, Any]
    after: dict[str, Any]
    old: npt.NDArray[Any]
    new: npt.NDArray[Any]
    refusal: type[Exception]


def numbers(*shape: int) -> npt.NDArray[Any]:
    return np.arange(1, 1 + np.prod(shape), dtype=np.float32).reshape(shape)


CHANGES = {
    "larger": Change({"dims": (4,)}, {"dims": (800,)}, numbers(4), numbers(800), TensorShapeError),
    "smaller-batches": Change(
        {"dims": (4,), "max_batch_size": 4},
        {"dims": (4,), "max_batch_size": 2},
        numbers(4, 4),
        numbers(2, 4),
        BatchSizeError,
    ),
    "batches": Change({"dims": (4,)}, {"dims": (4,), "max_batch_size": 4}, numbers(4), numbers(3, 4), TensorShapeError),
    "dtype": Change({}, {"dtype": "INT32"}, numbers(5), numbers(5).astype(np.int32), TensorTypeError),
}

# The models of tests that reload one each, as they are at first.
AT_FIRST: dict[str, dict[str, Any]] = {
    "direct_and_more": {},
    "all_but_direct": {"paths": "triton-shm,inline"},
    "prepared": {"dims": (4,)},
    "here_and_gone": {},
    "killed": {},
}


@pytest.fixture(scope="module")
def mirror(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mirror]:
    mirror = Mirror(tmp_path_factory.mktemp("mirror"), ONCE)
    with mirror:
        mirror.configure_all(AT_FIRST | {name: change.before for name, change in CHANGES.items()})
        yield mirror


@contextlib.contextmanager
def every_client(mirror: Mirror) -> Iterator[dict[str, AnyClient]]:
    with contextlib.ExitStack() as stack:
        yield {
            flavour: stack.enter_context(
                client_of(flavour, url_of(mirror.server, flavour), timeout_s=20, inline_bytes=0)
            )
            for flavour in FLAVOURS
        }


def outcome(client: AnyClient, model: str, x: npt.NDArray[Any], path: PathName = "auto") -> str | Exception:
    """Return the path of a call that gave what it should, or else what it raised."""
    try:
        with client.infer(model, {"X": x}, path=path) as result:
            np.testing.assert_array_equal(result["Y"], x, strict=True)
            return result.path
    except Exception as error:
        return error.with_traceback(None)


@contextlib.contextmanager
def client_of_every_case(mirror: Mirror) -> Iterator[dict[Case, AnyClient]]:
    """Make one client of each flavour for each path: none learns of a change by what another path was told."""
    with contextlib.ExitStack() as stack:
        yield {
            (flavour, path): stack.enter_context(client_of(flavour, url_of(mirror.server, flavour), timeout_s=20))
            for flavour in TWO_FLAVOURS
            for path in PATHS
        }


def test_what_a_model_takes_now_goes_through_and_the_rest_is_refused_for_what_it_is(mirror: Mirror) -> None:
    """Two clients of every case before and after each change: the first goes on as before, the second knows of it."""
    with client_of_every_case(mirror) as unaware, client_of_every_case(mirror) as aware:
        for case, client in (*unaware.items(), *aware.items()):
            for name, change in CHANGES.items():
                assert outcome(client, name, change.old, case[1]) == case[1]
        mirror.configure_all({name: change.after for name, change in CHANGES.items()})
        for name, change in CHANGES.items():
            for case, client in unaware.items():
                assert type(outcome(client, name, change.old, case[1])) is change.refusal, (name, case)
            for case, client in (*unaware.items(), *aware.items()):
                assert outcome(client, name, change.new, case[1]) == case[1], (name, case)


@pytest.mark.parametrize(
    ("model", "before", "paths", "after"),
    [
        ("direct_and_more", "direct", "triton-shm,inline", "triton-shm"),
        ("all_but_direct", "triton-shm", "direct", "direct"),
    ],
)
def test_an_undeclared_path_is_left(mirror: Mirror, model: str, before: PathName, paths: str, after: PathName) -> None:
    x = numbers(6)
    with every_client(mirror) as clients:
        for client in clients.values():
            assert outcome(client, model, x) == before
        mirror.configure(model, paths=paths)
        for client in clients.values():
            assert outcome(client, model, x) == after
            assert type(outcome(client, model, x, before)) is PathUnavailableError


def test_a_prepared_call_whose_model_changed_is_refused_and_a_new_one_is_right(mirror: Mirror) -> None:
    calls: list[AnyCall] = []
    with every_client(mirror) as clients, contextlib.ExitStack() as stack:
        for client in clients.values():
            for path in PATHS:
                call: AnyCall = client.prepare("prepared", {"X": ((4,), np.float32)}, path=path)
                stack.callback(call.close)
                call.inputs["X"][:] = numbers(4)
                call.infer().release()
                calls.append(call)
        mirror.configure("prepared", dims=(8,))
        for call in calls:
            with pytest.raises(InferenceError, match="X"):
                call.infer()
        for client in clients.values():
            for path in PATHS:
                another: AnyCall = client.prepare("prepared", {"X": ((8,), np.float32)}, path=path)
                stack.callback(another.close)
                another.inputs["X"][:] = numbers(8)
                with another.infer() as result:
                    np.testing.assert_array_equal(result["Y"], numbers(8))


def test_a_model_that_went_away_is_missed_and_found_again(mirror: Mirror) -> None:
    x = numbers(6)
    with every_client(mirror) as clients:
        for client in clients.values():
            assert [outcome(client, "here_and_gone", x, path) for path in PATHS] == list(PATHS)
        mirror.grpc.unload_model("here_and_gone")
        for client in clients.values():
            for path in PATHS:
                missed = outcome(client, "here_and_gone", x, path)
                assert type(missed) is InferenceError
                assert "here_and_gone" in str(missed)
        mirror.configure("here_and_gone")
        for client in clients.values():
            assert [outcome(client, "here_and_gone", x, path) for path in PATHS] == list(PATHS)


@outlives_models
def test_a_model_whose_process_was_killed_fails_until_it_is_loaded_anew(mirror: Mirror) -> None:
    x = numbers(6)
    with every_client(mirror) as clients:
        for client in clients.values():
            assert [outcome(client, "killed", x, path) for path in PATHS] == list(PATHS)
        kill_stub(mirror.server, "killed")
        for flavour, path in zip(TWO_FLAVOURS, PATHS, strict=False):  # the server takes a second for each
            failed = outcome(clients[flavour], "killed", x, path)
            assert type(failed) is InferenceError
            assert "is not healthy" in str(failed)
        mirror.configure("killed", dims=(6,))
        for client in clients.values():
            assert [outcome(client, "killed", x, path) for path in PATHS] == list(PATHS)
