"""Which path a model's calls take, and which memory: sealed if the model can fetch it, which is tried once."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator
from typing import Any, TypeVar

import numpy as np
import pytest

from shm_backend_utils.client import CopyWarning, InferenceError, PathUnavailableError, ShmClient
from shm_backend_utils.client.explanation import Check, Explanation
from shm_backend_utils.client.known_model import KnownModel
from shm_backend_utils.client.options import check_path
from shm_backend_utils.client.paths.choice import PathChooser
from shm_backend_utils.client.paths.triton_shm import Registrations
from shm_backend_utils.client.steps import Offload, Send, Steps
from shm_backend_utils.client.transports.http.codec import HttpCodec
from shm_backend_utils.client.transports.transport import is_this_machine
from shm_backend_utils.errors import CallerError, RegionGoneError, RegionRefusedError, ShmError, refusal
from shm_backend_utils.memory.pool.options import PoolOptions
from shm_backend_utils.model_spec import ModelSpec
from shm_backend_utils.protocol.handover import parse_sealed_key
from shm_backend_utils.protocol.parameters import SLOT_PARAMETER, parse_address
from tests.unit.fake_server import FakeServer, Order, config
from tests.unit.fake_wires import client_of

T = TypeVar("T")
FAR_AWAY = "192.0.2.1"  # TEST-NET-1 of RFC 5737, which is nobody's
CARRIER = {"name": "SHM", "data_type": "TYPE_UINT8", "dims": [-1], "optional": True}
TENSOR = {"name": "X", "data_type": "TYPE_FP32", "dims": [-1], "optional": True}


def model(paths: str | None = "direct,triton-shm,inline", uids: str | None = None, **changes: Any) -> KnownModel:
    values = {"SHM_PATHS": paths, "SHM_ALLOWED_UIDS": uids}
    parameters = {name: {"string_value": value} for name, value in values.items() if value is not None}
    config = {"name": "resize", "input": [TENSOR], "parameters": parameters} | changes
    return KnownModel(ModelSpec.from_config(config), head_room=1)


def run(operation: Steps[T]) -> T:
    """Do an operation to which a server on another machine answers: it finds no memory of this one."""
    try:
        step = next(operation)
        while True:
            if isinstance(step, Offload):
                step = operation.send(step.work())
            else:
                assert isinstance(step, Send)
                step = operation.throw(InferenceError("Unable to open shared memory region: 'its key'"))
    except StopIteration as end:
        value: T = end.value
        return value


@pytest.fixture
def far_away() -> PathChooser:
    codec = HttpCodec()
    return PathChooser(codec, FAR_AWAY, Registrations(codec), PoolOptions(), 0)


def explained(chooser: PathChooser, known: KnownModel) -> Explanation:
    return run(chooser.explain(known, 1.0))


def found(explanation: Explanation, name: str) -> Check:
    (check,) = (check for check in explanation.checks if check.name == name)
    return check


def test_another_path_is_refused_with_those_that_there_are(far_away: PathChooser) -> None:
    assert [check_path(known) for known in ("auto", "inline")] == ["auto", "inline"]
    for path in ("", "Direct", "triton_shm", "shm"):
        with pytest.raises(CallerError, match=f"path is '{path}'; expected one of auto, direct, triton-shm, inline"):
            check_path(path)
    with pytest.raises(PathUnavailableError, match="another machine.*; .*does not declare the direct path"):
        run(far_away.choose(model(paths=None), "direct", 1.0))


@pytest.mark.parametrize(
    ("host", "is_here"),
    [
        *((host, True) for host in ("localhost", "127.0.0.1", "127.0.0.2", "0.0.0.0")),
        *((host, False) for host in (FAR_AWAY, "2001:db8::1", "not a host name", "-", "1.2.3.4.5")),
    ],
)
def test_a_host_is_this_machine_by_its_addresses_alone(host: str, is_here: bool) -> None:
    assert is_this_machine(host) is is_here


@pytest.mark.parametrize(
    ("known", "name", "outcome"),
    [
        (model(), "declares direct?", True),
        (model(paths="triton-shm,inline"), "declares direct?", False),
        (model(paths=None), "declares direct?", False),
        (model(paths="direct,inline"), "declares triton-shm?", False),
        (model(paths="direct,triton-shm"), "declares inline?", False),
        (model(), "inputs optional?", True),
        (model(input=[TENSOR | {"optional": False}]), "inputs optional?", False),
        (model(max_batch_size=8), "inputs optional?", False),
        (model(max_batch_size=8, input=[TENSOR, CARRIER]), "inputs optional?", True),
        (model(input=[TENSOR | {"dims": [-1] * 33}]), "tensors fit a slot?", False),
        (model(), "user allowed?", None),
        (model(uids="any"), "user allowed?", True),
        (model(uids=f"1000000, {os.geteuid()}"), "user allowed?", True),
        (model(uids="1000000"), "user allowed?", False),
        (model(uids=""), "user allowed?", False),
    ],
)
def test_what_is_declared_is_checked(far_away: PathChooser, known: KnownModel, name: str, outcome: bool | None) -> None:
    assert found(explained(far_away, known), name).outcome is outcome


def test_a_decision_is_logged_once_until_a_refusal(far_away: PathChooser, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "shm_backend_utils")
    known, other = model(), model()
    explained(far_away, known)
    assert caplog.records
    first = explained(far_away, known)
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith(f"model 'resize' takes the path inline: {FAR_AWAY} is another machine")
    assert run(far_away.choose(known, "auto", 1.0)) == "inline"
    assert known.explanation is first
    far_away.refuse(known, "inline", "it says no")
    with contextlib.suppress(PathUnavailableError):
        run(far_away.choose(known, "auto", 1.0))
    assert known.explanation is not first
    explanation = explained(far_away, known)
    assert found(explanation, "tried inline?").detail == "it was tried: it says no"
    assert (explanation.path, explained(far_away, other).path) == (None, "inline"), "for that model alone"


@pytest.mark.parametrize("paths", [None, "direct,triton-shm,inline"])
def test_an_ensemble_has_no_direct_path_whatever_it_declares(far_away: PathChooser, paths: str | None) -> None:
    """Its steps would not find what lies in shared memory."""
    explanation = explained(far_away, model(paths, input=[TENSOR | {"optional": False}], platform="ensemble"))
    assert not explanation.open("direct")
    (detail,) = [check.detail for check in explanation.checks if check.needed_by == ("direct",)]
    assert detail.startswith("model 'resize' is an ensemble: Triton passes its tensors to the steps itself, whatever")
    assert "call a step by its own name, or a model that calls the steps by call.forward" in detail


X = np.arange(6, dtype=np.float32)


class BlindServer(FakeServer):
    """Its models cannot fetch sealed memory, for a reason that may change; it counts the requests that tell that."""

    error: ShmError | None = RegionGoneError("regions[0] is handed over by nobody")
    refused = 0

    def infer(self, order: Order) -> Any:
        if SLOT_PARAMETER in order.parameters and is_sealed(order) and self.error is not None:
            self.refused += 1
            raise InferenceError(refusal(self.error), "StatusCode.INTERNAL")
        return super().infer(order)


def is_sealed(order: Order) -> bool:
    return parse_sealed_key(parse_address(order.parameters[SLOT_PARAMETER]).key) is not None


@pytest.fixture
def blind() -> Iterator[BlindServer]:
    server = BlindServer(config("m"))
    with server:
        yield server


def check_of(client: ShmClient, model: str = "m") -> Check | None:
    return next((check for check in client.explain(model).checks if check.name == "sealed memory?"), None)


def infer(client: ShmClient) -> None:
    np.testing.assert_array_equal(client.infer("m", {"IN0": X})["OUT0"], 2 * X)


@pytest.mark.parametrize("error", [BlindServer.error, RegionRefusedError("regions[0]", "too late")])
def test_else_it_lies_in_dev_shm_and_to_look_again_is_to_try_again(blind: BlindServer, error: ShmError) -> None:
    blind.error = error
    with client_of(blind) as client:
        for _ in range(3):
            infer(client)
        assert blind.refused == 1
        assert [is_sealed(order) for order in blind.orders] == [False] * 3
        check = check_of(client)
        assert check is not None
        assert check.outcome is False
        assert str(error) in check.detail
        assert client.explain("m").path == "direct"
        blind.error = None
        client.explain("m")
        infer(client)
        assert is_sealed(blind.orders[-1])


def test_who_wants_none_and_models_that_are_closed_to_direct_are_not_asked(blind: BlindServer) -> None:
    blind.configs["closed"] = config("closed", parameters={"SHM_PATHS": {"string_value": "triton-shm,inline"}})
    with client_of(blind, pool=PoolOptions(region="system")) as client:
        infer(client)
        assert [is_sealed(order) for order in blind.orders] == [False]
        assert check_of(client) is None
    with client_of(blind) as client:
        assert check_of(client, "closed") is None
    assert blind.refused == 0


def refuse_sealed(order: Order) -> None:
    if SLOT_PARAMETER in order.parameters and is_sealed(order):
        raise InferenceError(refusal(RegionRefusedError(SLOT_PARAMETER, "the server closes too much")))


def test_sealed_memory_alone_gives_way_to_another_path(server: FakeServer, caplog: pytest.LogCaptureFixture) -> None:
    with client_of(server, pool=PoolOptions(region="sealed")) as client, caplog.at_level(logging.WARNING):
        infer(client)
        server.before = refuse_sealed
        infer(client)
        seen = len(server.orders)
        infer(client)
        assert not [order for order in server.orders[seen:] if SLOT_PARAMETER in order.parameters]
    assert "take memory in /dev/shm" not in caplog.text


def test_memory_that_is_refused_with_every_region_closes_the_path(server: FakeServer) -> None:
    def refuse_slots(order: Order) -> None:
        if SLOT_PARAMETER in order.parameters:
            raise InferenceError(refusal(RegionRefusedError("regions[1]", "the GPU is another")))

    with client_of(server) as client:
        infer(client)
        server.before = refuse_slots
        infer(client)
        in_slots = [order for order in server.orders if SLOT_PARAMETER in order.parameters]
        assert [is_sealed(order) for order in in_slots] == [True, True, True, False]
        assert client.infer("m", {"IN0": X}).path != "direct"


def test_what_one_model_can_do_without_another_one_still_needs() -> None:
    """Neither shares /dev/shm with the client, and one cannot fetch sealed memory."""

    class Pod(BlindServer):
        def register(self, name: str, key: str, byte_size: int) -> None:
            raise InferenceError(f"Unable to open shared memory region: '{key}'", "StatusCode.INTERNAL")

        def infer(self, order: Order) -> Any:
            return super().infer(order) if order.model == "blind" else FakeServer.infer(self, order)

    with Pod(config("sees"), config("blind")) as server, client_of(server, inline_bytes=0) as client:
        for model, path in (("sees", "direct"), ("blind", "inline")):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", CopyWarning)
                assert client.infer(model, {"IN0": X}).path == path
        assert [client.explain(model).path for model in ("sees", "blind")] == ["direct", "inline"]


@pytest.mark.parametrize(
    "answer",
    [("Stub process 'm_0' is not healthy.", "StatusCode.INTERNAL"), ("must specify a non-zero correlation ID", "400")],
)
def test_an_answer_of_no_verdict(server: FakeServer, monkeypatch: pytest.MonkeyPatch, answer: tuple[str, str]) -> None:
    def refuse(_: FakeServer, order: Order) -> None:
        raise InferenceError(*answer)

    monkeypatch.setattr(FakeServer, "_refuse_trial", refuse)
    with client_of(server) as client:
        explanation = client.explain("m")
        check = found(explanation, "sealed memory?")
        assert (explanation.path, check.outcome) == ("direct", None)
        assert explanation.reason.startswith("only a call can tell: ")
        assert check.detail in explanation.reason
        monkeypatch.undo()
        infer(client)
        assert [is_sealed(order) for order in server.orders] == [True]
