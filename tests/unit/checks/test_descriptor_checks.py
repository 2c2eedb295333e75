"""What messages say of a descriptor that lies, and of one that names tensors without memory."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shm_backend_utils.errors import TableError
from shm_backend_utils.protocol import named
from shm_backend_utils.protocol.spans import Table

VERSION = json.loads(named.encode_descriptor("m", Table({}, {})))["v"]
REGION = {"kind": "named", "name": "r"}


def refusal(**changes: Any) -> TableError:
    value = {"v": VERSION, "model": "m", "regions": [REGION], "inputs": {}, "outputs": {}, **changes}
    with pytest.raises(TableError) as caught:
        named.parse_descriptor(json.dumps(value))
    return caught.value


def test_tensors_without_regions_are_refused() -> None:
    error = refusal(regions=[], outputs={"Y": [0, 0, 0]})
    assert (error.field, error.found) == ("shm_io.outputs.Y[0]", "0")
    assert error.expected == "no tensor at all, as there are no regions"


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (None, "null or nothing"),
        (True, "a boolean"),
        (False, "a boolean"),
        (1, "a number"),
        (2.5, "a number"),
        ("", "an empty string"),
        ("secret", "another string"),
        ([1], "another array"),
    ],
)
def test_a_message_tells_the_kind_of_what_was_found_and_not_what_it_is(value: Any, found: str) -> None:
    assert refusal(inputs=value).found == found


@pytest.mark.parametrize(
    ("value", "found"), [(-1, "-1"), (2**255, "a number"), (-(2**255) + 1, str(1 - 2**255)[:61]), (2**300, "a number")]
)
def test_numbers_are_shown_unless_they_are_too_long(value: int, found: str) -> None:
    assert refusal(outputs={"Y": [0, value, 0]}).found.startswith(found)


def test_a_message_names_the_bounds_of_what_is_bounded() -> None:
    assert refusal(outputs={"Y": [1, 0, 0]}).expected == "an integer from 0 to 0"
    assert refusal(outputs={"Y": [0, -1, 0]}).expected == "a 64-bit integer of 0 or more"
