"""What config.pbtxt says of regions."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from shm_backend_utils.errors import ModelError
from shm_backend_utils.model import config as config_module
from shm_backend_utils.model.config import PARAMETERS, Config


def config(**parameters: str) -> Config:
    return Config.from_config(
        {"parameters": {name: {"string_value": value} for name, value in parameters.items()}},
    )


def test_everything_has_a_default() -> None:
    assert Config.from_config({}) == Config()


@pytest.mark.parametrize(
    ("typo", "meant"),
    [("SHM_PATH", "SHM_PATHS"), ("shm_paths", "SHM_PATHS"), ("SHM_ALOWED_UIDS", "SHM_ALLOWED_UIDS")],
)
def test_a_name_that_is_nearly_one_of_ours_is_refused_and_told_which(typo: str, meant: str) -> None:
    with pytest.raises(ModelError, match=f"has a parameter {typo}, which means nothing; did you mean {meant}"):
        config(**{typo: "off"})


def test_a_name_that_is_like_none_of_ours_is_refused_and_told_all() -> None:
    with pytest.raises(ModelError) as caught:
        config(SHM_QQQQQQ="1")
    assert all(name in str(caught.value) for name in PARAMETERS)


def test_huge_pages_have_gone() -> None:
    with pytest.raises(ModelError, match="SHM_HUGE_PAGES went with 0.3: all memory has ordinary pages; remove it from"):
        config(SHM_HUGE_PAGES="false")


def test_the_known_names_are_those_that_are_read_and_those_that_the_page_tells() -> None:
    page = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()
    source = Path(config_module.__file__).read_text()
    read = set(re.findall(r'"(SHM_[A-Z_]+)"', source[source.index("class Config") :]))
    assert read | {"SHM_PATHS", "SHM_ALLOWED_UIDS"} == PARAMETERS
    assert set(re.findall(r"^\| `(SHM_[A-Z_]+)` \|", page, re.MULTILINE)) == PARAMETERS


def test_parameters_of_others_do_not_matter() -> None:
    assert config(EXECUTION_ENV_PATH="somewhere", FORCE_CPU_ONLY_INPUT_TENSORS="no") == Config()


@pytest.mark.parametrize("name", ["SHM_STREAM_PATIENCE_S", "SHM_STREAM_TOTAL_PATIENCE_S"])
@pytest.mark.parametrize("text", ["", "0", "-1", "nan", "inf", "a minute"])
def test_a_patience_that_is_no_time_is_refused(name: str, text: str) -> None:
    with pytest.raises(ModelError, match=f"parameter {name} is .*; expected seconds, more than 0"):
        config(**{name: text})


def test_the_patience_of_streams_is_for_a_frame_and_for_all_of_them() -> None:
    found = config(SHM_STREAM_PATIENCE_S="2", SHM_STREAM_TOTAL_PATIENCE_S="7.5")
    assert (found.stream_patience_s, found.stream_total_patience_s) == (2, 7.5)


def test_a_longer_patience_for_a_frame_is_one_for_all_frames_too() -> None:
    assert config(SHM_STREAM_PATIENCE_S="600").stream_total_patience_s == 600


def test_a_shorter_patience_for_all_frames_than_for_one_ends_streams_first() -> None:
    assert config(SHM_STREAM_TOTAL_PATIENCE_S="20").stream_total_patience_s == 20


@pytest.mark.parametrize("text", ["", "0", "-1", "nan", "inf", "a second", "60.1", "1e9"])
def test_a_time_for_handing_over_that_is_none_or_too_long_is_refused(text: str) -> None:
    with pytest.raises(
        ModelError, match="parameter SHM_HANDOVER_S is .*; expected seconds, more than 0 and at most 60"
    ):
        config(SHM_HANDOVER_S=text)


@pytest.mark.parametrize(("text", "seconds"), [("0.25", 0.25), ("60", 60)])
def test_the_time_for_handing_over_can_be_said(text: str, seconds: float) -> None:
    assert config(SHM_HANDOVER_S=text).handover_s == seconds
    assert config().handover_s == 1


@pytest.mark.parametrize("text", ["", "localhost:8000", "ftp://h", "http://", "http://h:port", "http://h:0", "8000"])
def test_what_is_no_url_of_a_server_is_refused(text: str) -> None:
    with pytest.raises(ModelError, match="parameter SHM_SERVER_URL is .*; expected http://HOST:PORT"):
        config(SHM_SERVER_URL=text)


def test_this_user_and_root_are_allowed_by_default() -> None:
    assert config().allowed_uids == frozenset({os.geteuid(), 0})


def test_users_can_be_listed() -> None:
    assert config(SHM_ALLOWED_UIDS="1000, 1001").allowed_uids == frozenset({1000, 1001})


def test_a_list_of_users_replaces_the_default() -> None:
    assert config(SHM_ALLOWED_UIDS="65534").allowed_uids == frozenset({65534})


@pytest.mark.parametrize("text", ["any", " any "])
def test_every_user_can_be_allowed(text: str) -> None:
    assert config(SHM_ALLOWED_UIDS=text).allowed_uids is None


@pytest.mark.parametrize("text", ["", "root", "1000,", "-1", "1000 1001", "any,1000", "0x3e8", "1.5"])
def test_what_is_no_list_of_users_is_refused(text: str) -> None:
    with pytest.raises(ModelError, match="parameter SHM_ALLOWED_UIDS is .*; expected user ids"):
        config(SHM_ALLOWED_UIDS=text)


def test_foreign_regions_are_allowed_by_default() -> None:
    assert config().foreign_regions


def test_foreign_regions_can_be_allowed_in_words() -> None:
    assert config(SHM_FOREIGN_REGIONS="registered").foreign_regions


def test_foreign_regions_can_be_turned_off() -> None:
    assert not config(SHM_FOREIGN_REGIONS="off").foreign_regions


@pytest.mark.parametrize("text", ["", "on", "OFF", "false", "any"])
def test_what_is_no_word_for_foreign_regions_is_refused(text: str) -> None:
    with pytest.raises(ModelError, match="parameter SHM_FOREIGN_REGIONS is .*; expected registered or off"):
        config(SHM_FOREIGN_REGIONS=text)


def test_mapped_memory_has_no_limit_by_default() -> None:
    assert config().max_mapped_bytes is None


def test_mapped_memory_can_be_limited() -> None:
    assert config(SHM_MAX_MAPPED_BYTES="1073741824").max_mapped_bytes == 1 << 30


@pytest.mark.parametrize("text", ["", "1 GiB", "-1", "1e9", "1.0", "none"])
def test_what_is_no_number_of_bytes_is_refused(text: str) -> None:
    with pytest.raises(ModelError, match="parameter SHM_MAX_MAPPED_BYTES is .*; expected a number of bytes"):
        config(SHM_MAX_MAPPED_BYTES=text)


@pytest.mark.parametrize(("text", "expected"), [("true", True), ("false", False)])
def test_metrics_are_turned_on_and_off_in_words(text: str, expected: bool) -> None:
    assert config(SHM_METRICS=text).metrics is expected


def test_metrics_are_off_by_default() -> None:
    assert not config().metrics


@pytest.mark.parametrize("text", ["", "on", "True", "1", "yes"])
def test_what_is_no_word_for_metrics_is_refused(text: str) -> None:
    with pytest.raises(ModelError, match="parameter SHM_METRICS is .*; expected true or false"):
        config(SHM_METRICS=text)


@pytest.mark.parametrize(("text", "expected"), [("true", True), ("false", False)])
def test_debugging_is_turned_on_and_off_in_words(text: str, expected: bool) -> None:
    assert config(SHM_DEBUG=text).debug is expected
    assert not config().debug


def test_the_server_can_be_named() -> None:
    assert config(SHM_SERVER_URL="http://127.0.0.1:9").server_url == "http://127.0.0.1:9"


def test_registrations_are_checked_by_default() -> None:
    assert config().checks_registrations
    assert config(SHM_REGISTRATIONS="checked").checks_registrations


def test_registrations_can_be_trusted() -> None:
    assert not config(SHM_REGISTRATIONS="trusted").checks_registrations


@pytest.mark.parametrize("text", ["", "on", "true", "Trusted", "trusted "])
def test_what_is_no_word_for_registrations_is_refused(text: str) -> None:
    with pytest.raises(ModelError, match="parameter SHM_REGISTRATIONS is .*; expected checked or trusted"):
        config(SHM_REGISTRATIONS=text)
