"""The two parameters by which a request names its slot, and how wrong ones are refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shm_backend_utils.errors import TableError, VersionError
from shm_backend_utils.protocol.address import SlotAddress, parse_address, parse_generation

KEY = "shmbu-4711-5ec7e75ec7e75ec7"
TOKEN = "0123456789abcdef" * 2
ADDRESS = f"2/resize/{KEY}/{TOKEN}/7"

json_values = st.none() | st.booleans() | st.integers() | st.floats() | st.lists(st.integers()) | st.text()


def test_an_address_is_read_in_full() -> None:
    assert parse_address(ADDRESS) == SlotAddress("resize", KEY, TOKEN, 7)


def test_an_address_is_written_as_it_is_read() -> None:
    assert str(parse_address(ADDRESS)) == ADDRESS


@pytest.mark.parametrize("model", ["m", "a b", "größe", "x:y.z-1", "M" * 300])
@pytest.mark.parametrize("key", ["shmbu-1", "shmbu--", "shmbu-" + "0az-" * 16])
@pytest.mark.parametrize("slot", [0, 1, 1023])
def test_any_model_key_and_slot_is_read_as_it_was_written(model: str, key: str, slot: int) -> None:
    address = SlotAddress(model, key, TOKEN, slot)
    assert parse_address(str(address)) == address


@pytest.mark.parametrize(
    "value",
    [
        "2",
        "2/",
        "2////",
        f"2/resize/{KEY}/{TOKEN}",
        f"2/resize/{KEY}/{TOKEN}/",
        f"2//{KEY}/{TOKEN}/0",
        f"2/resize//{TOKEN}/0",
        f"2/resize/{KEY}//0",
        f"{ADDRESS}/0",
        f"{ADDRESS} ",
        f"{ADDRESS}\n",
        f"2/resize/shmbu-/{TOKEN}/0",
        f"2/resize/shmbu-{'a' * 65}/{TOKEN}/0",
        f"2/resize/SHMBU-1/{TOKEN}/0",
        f"2/resize/shmbu-A/{TOKEN}/0",
        f"2/resize/shmbu-a_b/{TOKEN}/0",
        f"2/resize/shmbu-../{TOKEN}/0",
        f"2/resize/triton_python_backend_shm_region_1/{TOKEN}/0",
        f"2/resize/../{KEY}/{TOKEN}/0",
        f"2/resize/{KEY}/{TOKEN.upper()}/0",
        f"2/resize/{KEY}/{TOKEN[:-1]}/0",
        f"2/resize/{KEY}/{TOKEN}0/0",
        f"2/resize/{KEY}/{TOKEN}/-1",
        f"2/resize/{KEY}/{TOKEN}/1.0",
        f"2/resize/{KEY}/{TOKEN}/1024",
        f"2/resize/{KEY}/{TOKEN}/10000000",
        f"2/resize/{KEY}/{TOKEN}/٣",  # a digit, but none of ours
    ],
)
def test_what_is_no_address_is_refused_and_not_shown(value: str) -> None:
    with pytest.raises(TableError, match="shm_slot: found other text, expected 2/MODEL/KEY/TOKEN/SLOT") as refusal:
        parse_address(value)
    assert refusal.value.code == "shm:table"
    assert TOKEN not in str(refusal.value)
    assert KEY not in str(refusal.value)


@pytest.mark.parametrize(
    ("value", "version"),
    [
        (f"3/resize/{KEY}/{TOKEN}/0", "3"),
        ("1", "1"),
        (f"02/resize/{KEY}/{TOKEN}/0", "02"),
        ("", "none"),
        (f"/resize/{KEY}/{TOKEN}/0", "none"),
        (f"resize/{KEY}/{TOKEN}/0", "none"),
        (f"{TOKEN}/0", "none"),
        (f"{'9' * 20}/resize", "none"),
    ],
)
def test_another_version_is_refused_and_both_are_named(value: str, version: str) -> None:
    with pytest.raises(VersionError, match=f"found {version}, expected 2, ") as refusal:
        parse_address(value)
    assert refusal.value.code == "shm:version"
    assert TOKEN not in str(refusal.value)


@pytest.mark.parametrize("value", [None, True, 2, 2.5, [ADDRESS], {}], ids=str)
def test_what_is_no_string_is_refused(value: object) -> None:
    with pytest.raises(TableError, match="shm_slot: found a value of type .*, expected a string"):
        parse_address(value)


@given(st.text() | st.text("/2shmbu-0123456789abcdef", max_size=80))
def test_any_text_is_an_address_or_refused(text: str) -> None:
    try:
        address = parse_address(text)
    except TableError:
        return
    assert address == parse_address(str(address))


@pytest.mark.parametrize("generation", [1, 77, 2**63 - 1])
def test_a_generation_is_returned(generation: int) -> None:
    assert parse_generation(generation) == generation


@pytest.mark.parametrize("wrong", [None, True, 0, -1, 2**63, 10**300, 1.0, float("nan"), "1", [1], {}], ids=str)
def test_a_wrong_generation_is_refused_by_the_parameters_name(wrong: object) -> None:
    with pytest.raises(TableError, match="shm_generation: found no such number, expected an integer from 1 to"):
        parse_generation(wrong)


@given(json_values)
def test_any_value_is_a_generation_or_refused(value: object) -> None:
    try:
        generation = parse_generation(value)
    except TableError:
        return
    assert generation is value
    assert type(value) is int
    assert 1 <= value < 2**63
