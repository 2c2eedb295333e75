"""Which path a model's calls take, as far as it can be told without a server."""

from __future__ import annotations

import contextlib
import os
from typing import Any, TypeVar

import pytest

from shm_backend_utils.client.errors import InferenceError, PathUnavailableError
from shm_backend_utils.client.explanation import Check, Explanation
from shm_backend_utils.client.known_model import KnownModel
from shm_backend_utils.client.options import check_path
from shm_backend_utils.client.paths.choice import PathChooser
from shm_backend_utils.client.paths.triton_shm import Registrations
from shm_backend_utils.client.steps import Offload, Send, Steps
from shm_backend_utils.client.transports.http.codec import HttpCodec
from shm_backend_utils.client.transports.this_machine import is_this_machine
from shm_backend_utils.errors import CallerError
from shm_backend_utils.memory.pool.options import PoolOptions
from shm_backend_utils.model_spec import ModelSpec

T = TypeVar("T")
FAR_AWAY = "192.0.2.1"  # TEST-NET-1 of RFC 5737, which is nobody's
CARRIER = {"name": "SHM", "data_type": "TYPE_UINT8", "dims": [-1], "optional": True}
X = {"name": "X", "data_type": "TYPE_FP32", "dims": [-1], "optional": True}


def model(paths: str | None = "direct,triton-shm,inline", uids: str | None = None, **changes: Any) -> KnownModel:
    """Return a model that serves the direct path, with some of its configuration changed."""
    values = {"SHM_PATHS": paths, "SHM_ALLOWED_UIDS": uids}
    parameters = {name: {"string_value": value} for name, value in values.items() if value is not None}
    config = {"name": "resize", "input": [X], "parameters": parameters} | changes
    return KnownModel(ModelSpec.from_config(config), head_room=1)


def run(operation: Steps[T]) -> T:
    """Do an operation to which a server on another machine answers: it finds no memory of this one."""
    try:
        step = next(operation)
        while True:
            if isinstance(step, Offload):
                step = operation.send(step.work())
                continue
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


@pytest.mark.parametrize(
    ("host", "is_here"),
    [
        *((host, True) for host in ("localhost", "127.0.0.1", "127.0.0.2", "0.0.0.0")),
        *((host, False) for host in (FAR_AWAY, "2001:db8::1", "not a host name", "-", "1.2.3.4.5")),
    ],
)
def test_a_host_is_this_machine_by_its_addresses_alone(host: str, is_here: bool) -> None:
    assert is_this_machine(host) is is_here


@pytest.mark.parametrize("path", ["", "Direct", "triton_shm", "shm"])
def test_another_path_is_refused_with_those_that_there_are(path: str) -> None:
    assert [check_path(known) for known in ("auto", "inline")] == ["auto", "inline"]
    with pytest.raises(CallerError, match=f"path is '{path}'; expected one of auto, direct, triton-shm, inline"):
        check_path(path)


def test_to_another_machine_tensors_go_inline(far_away: PathChooser) -> None:
    explanation = explained(far_away, model())
    assert explanation.path == "inline"
    assert explanation.reason.startswith(f"{FAR_AWAY} is another machine, which shares no memory with this one")


def test_a_path_that_is_asked_for_by_name_is_refused_with_all_that_stands_against_it(far_away: PathChooser) -> None:
    message = "'resize' cannot be called on the path 'direct': .* is another machine"
    with pytest.raises(PathUnavailableError, match=message):
        run(far_away.choose(model(), "direct", 1.0))
    with pytest.raises(PathUnavailableError, match="another machine.*; .*does not declare the direct path"):
        run(far_away.choose(model(paths=None), "direct", 1.0))


def test_a_model_without_any_open_path_cannot_be_called(far_away: PathChooser) -> None:
    known = model(paths="direct")
    assert explained(far_away, known).path is None
    with pytest.raises(PathUnavailableError, match="cannot be called on the path 'auto'"):
        run(far_away.choose(known, "auto", 1.0))


@pytest.mark.parametrize(
    ("known", "name", "outcome"),
    [
        (model(), "declares direct?", True),
        (model(paths="triton-shm,inline"), "declares direct?", False),
        (model(paths=None), "declares direct?", False),
        (model(paths="direct,inline"), "declares triton-shm?", False),
        (model(paths="direct,triton-shm"), "declares inline?", False),
        (model(), "inputs optional?", True),
        (model(input=[X | {"optional": False}]), "inputs optional?", False),
        (model(max_batch_size=8), "inputs optional?", False),
        (model(max_batch_size=8, input=[X, CARRIER]), "inputs optional?", True),
        (model(input=[X | {"dims": [-1] * 33}]), "tensors fit a slot?", False),
        (model(), "user allowed?", None),
        (model(uids="any"), "user allowed?", True),
        (model(uids=f"1000000, {os.geteuid()}"), "user allowed?", True),
        (model(uids="1000000"), "user allowed?", False),
        (model(uids=""), "user allowed?", False),
    ],
)
def test_what_the_configuration_says_is_checked(
    far_away: PathChooser, known: KnownModel, name: str, outcome: bool | None
) -> None:
    assert found(explained(far_away, known), name).outcome is outcome


def test_a_model_that_declares_nothing_is_open_for_every_client(far_away: PathChooser) -> None:
    explanation = explained(far_away, model(paths=None))
    assert not [check for check in explanation.checks if check.name in ("declares triton-shm?", "declares inline?")]
    assert explanation.path == "inline"


def test_a_path_that_was_tried_in_vain_is_closed_for_that_model(far_away: PathChooser) -> None:
    known, other = model(), model()
    explained(far_away, known)
    far_away.refuse(known, "inline", "it says no")
    explanation = explained(far_away, known)
    assert found(explanation, "tried inline?").detail == "it was tried: it says no"
    assert (explanation.path, explained(far_away, other).path) == (None, "inline")


def test_a_decision_is_logged_once_and_remembered_until_something_was_refused(
    far_away: PathChooser, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "shm_backend_utils")
    known = model()
    first = explained(far_away, known)
    explained(far_away, known)
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith(f"model 'resize' takes the path inline: {FAR_AWAY} is another machine")
    first = explained(far_away, known)
    assert run(far_away.choose(known, "auto", 1.0)) == "inline"
    assert known.explanation is first
    far_away.refuse(known, "inline", "it says no")
    with contextlib.suppress(PathUnavailableError):
        run(far_away.choose(known, "auto", 1.0))
    assert known.explanation is not first


@pytest.mark.parametrize("paths", [None, "direct,triton-shm,inline"])
def test_an_ensemble_has_no_direct_path_whatever_it_declares(far_away: PathChooser, paths: str | None) -> None:
    """Its steps would not find what lies in shared memory."""
    explanation = explained(far_away, model(paths, input=[X | {"optional": False}], platform="ensemble"))
    assert not explanation.open("direct")
    details = [check.detail for check in explanation.checks if check.needed_by == ("direct",)]
    assert len(details) == 1
    assert details[0].startswith(
        "model 'resize' is an ensemble: Triton takes its tensors apart for the steps, whatever its SHM"
    )
    assert "call a step by its own name, or a model that calls the steps by call.forward" in details[0]
