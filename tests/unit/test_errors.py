"""Errors: one family, sorted by whose fault it is, and readable."""

from __future__ import annotations

import numpy as np
import pytest

from shm_backend_utils import errors
from shm_backend_utils.errors import (
    CallerError,
    ClosedError,
    MachineError,
    ModelError,
    PeerError,
    RegionGoneError,
    RegionRefusedError,
    ReplayedRequestError,
    ShmError,
    StaleRequestError,
    TableError,
    TensorError,
    VersionError,
    shown,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "None"),
        ("cuda", "'cuda'"),
        (np.float32(1.5), repr(np.float32(1.5))),
        ((1, "f4"), "(1, 'f4')"),
        (np.ones(1000), "an object of type ndarray"),
        ([np.ones(1000)], "an object of type list"),
        (object(), "an object of type object"),
        (10**5000, "a number too long to print"),
    ],
    ids=lambda each: type(each).__name__,
)
def test_a_wrong_value_is_shown_in_short(value: object, text: str) -> None:
    assert shown(value) == text


def test_a_long_value_is_shown_in_short() -> None:
    assert len(shown("x" * 10_000)) < 50
    assert len(shown(["x"] * 10_000)) < 50


@pytest.mark.parametrize("name", errors.__all__)
def test_every_error_is_a_shm_error(name: str) -> None:
    assert issubclass(getattr(errors, name), ShmError)


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        (TableError, CallerError),
        (VersionError, TableError),
        (TensorError, CallerError),
        (RegionRefusedError, CallerError),
        (ClosedError, CallerError),
        (RegionGoneError, PeerError),
        (StaleRequestError, PeerError),
        (ReplayedRequestError, PeerError),
    ],
)
def test_an_error_says_whose_fault_it_is(kind: type[ShmError], fault: type[ShmError]) -> None:
    assert issubclass(kind, fault)


@pytest.mark.parametrize("fault", [CallerError, PeerError, ModelError, MachineError])
def test_no_error_is_the_fault_of_two(fault: type[ShmError]) -> None:
    others = {CallerError, PeerError, ModelError, MachineError} - {fault}
    assert not any(issubclass(fault, other) for other in others)


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (TableError("inputs[0].offset", "1", "0"), ValueError),
        (TensorError("X", "tensor 'X' is wrong"), ValueError),
        (RegionRefusedError("regions[0]", "it is a symbolic link"), PermissionError),
        (ClosedError("this session"), RuntimeError),
        (RegionGoneError("regions[0] does not exist"), FileNotFoundError),
    ],
)
def test_code_that_knows_only_builtin_errors_catches_it(error: ShmError, builtin: type[Exception]) -> None:
    with pytest.raises(builtin):
        raise error


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (TableError("inputs[0].offset", "1", "0"), "inputs[0].offset: found 1, expected 0"),
        (
            VersionError("3", 2),
            "the request's protocol version: found 3, expected 2, which this model's shm_backend_utils speaks; install "
            "the same release for client and model",
        ),
        (TensorError("X", "tensor 'X' is wrong"), "tensor 'X' is wrong"),
        (RegionRefusedError("regions[0]", "it is a symbolic link"), "regions[0] refused: it is a symbolic link"),
        (ClosedError("this session"), "this session is closed; make a new one"),
        (RegionGoneError("regions[0] does not exist"), "regions[0] does not exist"),
        (StaleRequestError("given up"), "given up"),
        (MachineError("no space"), "no space"),
    ],
)
def test_an_error_reads_as_its_message(error: ShmError, message: str) -> None:
    assert str(error) == message


def test_a_table_error_keeps_its_parts() -> None:
    error = TableError("inputs[0].offset", "1", "0")
    assert (error.field, error.found, error.expected) == ("inputs[0].offset", "1", "0")


def test_a_tensor_error_keeps_the_tensors_name() -> None:
    assert TensorError("X", "tensor 'X' is wrong").tensor == "X"


def test_a_refusal_keeps_its_field_and_reason() -> None:
    error = RegionRefusedError("regions[0]", "it is a symbolic link")
    assert (error.field, error.reason) == ("regions[0]", "it is a symbolic link")


def test_a_refusal_is_not_taken_for_an_errno_and_a_file_name() -> None:
    error = RegionRefusedError("regions[0]", "it is a symbolic link")
    assert (error.errno, error.filename) == (None, None)
