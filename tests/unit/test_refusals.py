"""Refusal codes: the one word of an error's text that both halves branch on."""

from __future__ import annotations

import pytest

from shm_backend_utils import errors
from shm_backend_utils.errors import ModelError, PeerError, RegionGoneError, ShmError, StaleRequestError, TableError
from shm_backend_utils.protocol.refusals import code_in, refusal

CLASSES = [getattr(errors, name) for name in errors.__all__]


def test_a_refusal_begins_with_its_code() -> None:
    assert refusal(TableError("length", "7", "32 to 2048")) == "shm:table: length: found 7, expected 32 to 2048"
    assert refusal(RegionGoneError("regions[1] is gone")) == "shm:gone: regions[1] is gone"


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_the_code_of_every_error_is_read_back(kind: type[ShmError]) -> None:
    error = kind.__new__(kind)
    error.args = ("some words: and more",)
    assert code_in(refusal(error)) == kind.code


@pytest.mark.parametrize(
    "prefix",
    ["", "in ensemble 'two_steps', ", "[request id: 77] ", "[StatusCode.CANCELLED] ", "[400] in ensemble 'a b', "],
)
def test_what_triton_puts_in_front_is_passed_over(prefix: str) -> None:
    assert code_in(prefix + refusal(StaleRequestError("given up"))) == "shm:stale"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "shm:",
        "shm:stale",
        "shm:stale:",
        "SHM:STALE: ",
        "shm:Stale: no code of ours",
        " shm:stale: ",
        "RuntimeError: shm:stale: what model.py has read elsewhere",
        "the model says shm:stale: ",
        "\nshm:stale: ",
        "in ensemble 'x',shm:stale: ",
    ],
)
def test_other_text_has_no_code(text: str) -> None:
    assert code_in(text) == ""


def test_the_first_of_several_codes_counts() -> None:
    inner = refusal(StaleRequestError("given up"))
    assert code_in(refusal(ModelError(f"another model failed: {inner}"))) == "shm:model"


def test_a_subclass_without_a_code_of_its_own_has_its_parents() -> None:
    class Quiet(PeerError):
        pass

    assert refusal(Quiet("x")) == "shm:peer: x"
