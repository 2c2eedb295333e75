"""What a call may say beside its tensors, and what is refused."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.client.errors import TimeoutValueError
from shm_backend_utils.client.options import RequestOptions, check_options, check_timeout
from shm_backend_utils.errors import CallerError

EVERYTHING = RequestOptions(
    model_version="2",
    request_id="7",
    sequence_id=3,
    sequence_start=True,
    sequence_end=False,
    priority=1,
    timeout=1000,
    headers={"authorization": "me"},
    compression="gzip",
    parameters={"times": 3},
)


def test_every_option_is_taken() -> None:
    assert set(EVERYTHING) == set(RequestOptions.__annotations__)
    check_options(EVERYTHING)


def test_no_option_has_to_be_given() -> None:
    check_options(RequestOptions())


def test_an_option_that_does_not_exist_is_a_type_error_that_names_those_that_do() -> None:
    wrong: Any = {"time_out": 3}
    with pytest.raises(TypeError, match="no keyword argument 'time_out'; expected some of compression, .*, timeout"):
        check_options(wrong)


@pytest.mark.parametrize("name", ["shm_slot", "shm_generation", "shm_io"])
def test_a_parameter_that_the_client_writes_itself_is_refused(name: str) -> None:
    with pytest.raises(CallerError, match=f"parameter '{name}' is written by the client itself; leave it out"):
        check_options(RequestOptions(parameters={name: "mine"}))


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("model_version", 1, "a str"),
        ("request_id", b"7", "a str"),
        ("priority", "high", "an integer"),
        ("timeout", 1.5, "an integer: microseconds"),
        ("priority", -1, f"0 or more, and less than {2**64}"),
        ("timeout", 2**63, f"0 or more, and less than {2**63}"),
        ("headers", [("a", "b")], "a mapping"),
        ("parameters", [("a", 1)], "a mapping"),
    ],
)
def test_an_option_with_such_a_value_is_refused_before_anything_is_sent(name: str, value: Any, expected: str) -> None:
    wrong: Any = {name: value}
    with pytest.raises(CallerError, match=re.escape(f"{name} is {value!r}; expected {expected}")):
        check_options(wrong)


def test_integers_of_numpy_are_integers() -> None:
    check_options(RequestOptions(priority=np.uint8(1), timeout=np.int64(1000)))


@pytest.mark.parametrize("value", [None, [1], {"a": 1}, b"bytes"])
def test_a_parameter_that_no_request_can_carry_is_refused(value: Any) -> None:
    with pytest.raises(
        CallerError, match="parameter 'mine' is .*; expected a str, a bool, an int of 64 bits, or a float"
    ):
        check_options(RequestOptions(parameters={"mine": value}))


@pytest.mark.parametrize("compression", ["gzip", "deflate"])
def test_compressions_that_both_protocols_have_are_taken(compression: str) -> None:
    check_options(RequestOptions(compression=compression))


@pytest.mark.parametrize("compression", ["zip", "GZIP", ""])
def test_other_compressions_are_refused(compression: str) -> None:
    with pytest.raises(CallerError, match=f"compression is '{compression}'; expected 'gzip' or 'deflate'"):
        check_options(RequestOptions(compression=compression))


@pytest.mark.parametrize("timeout_s", [1e-9, 1, 60.0, 1e6])
def test_a_time_above_0_may_be_waited(timeout_s: float) -> None:
    assert check_timeout(timeout_s) == timeout_s


@pytest.mark.parametrize("timeout_s", [0, -1, -math.inf, math.nan])
def test_no_other_time_may_be_waited(timeout_s: float) -> None:
    with pytest.raises(TimeoutValueError, match=f"timeout_s is {timeout_s}; expected a number of seconds above 0"):
        check_timeout(timeout_s)


def test_the_message_calls_the_time_as_the_caller_does() -> None:
    with pytest.raises(ValueError, match="patience is 0"):
        check_timeout(0, "patience")
