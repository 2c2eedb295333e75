"""What docs/monitoring.md says: its commands run, its metrics are those that sessions publish."""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
from pathlib import Path

import pytest

from shm_backend_utils import cli
from shm_backend_utils.model.metrics import _BUCKETS, _FAMILIES, _PREFIX

TEXT = (Path(__file__).parents[2] / "docs" / "monitoring.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
QUERIES = [code for language, code in BLOCKS if language == "promql"]
COMMANDS = sorted(set(re.findall(r"^shm-backend-utils .*", TEXT, re.MULTILINE)))
BRACKETS = {"(": ")", "{": "}", "[": "]"}


def is_balanced(query: str) -> bool:
    """Return whether each bracket is closed."""
    expected = []
    for letter in query:
        if letter in BRACKETS:
            expected.append(BRACKETS[letter])
        elif letter in BRACKETS.values() and (not expected or expected.pop() != letter):
            return False
    return not expected


def test_every_metric_that_is_named_is_there() -> None:
    names = set(re.findall(rf"{_PREFIX}\w+", TEXT))
    assert names
    assert names <= {f"{_PREFIX}{name}" for name in _FAMILIES}


def test_the_table_has_every_metric_and_its_label() -> None:
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| (?:`(\w+)`)?", TEXT, re.MULTILINE)
    told = {name: label for names, label in rows for name in re.findall(r"\w+", names)}
    known = {name: family.label for name, family in _FAMILIES.items()}
    assert told.keys() == known.keys()
    assert {name: told[name] for name in told if not name.startswith("own_seconds_")} == {
        name: known[name] for name in known if not name.startswith("own_seconds_")
    }


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_has_the_labels_of_its_metrics(query: str) -> None:
    assert is_balanced(query)
    if _PREFIX in query:
        grouped = {label for labels in re.findall(r"by \(([^)]*)\)", query) for label in labels.split(", ")}
        own = {_FAMILIES[name].label for name in re.findall(rf"{_PREFIX}(\w+)", query)}
        assert grouped <= {"model", "version"} | own
        assert "sum by (" in query  # over the label session
        for path in re.findall(r'path="(\w+)"', query):
            assert path in _FAMILIES["calls_total"].values
    assert ("histogram_quantile" in query) == ("_bucket" in query) == ("le)" in query)
    assert _BUCKETS[-1] == "+Inf"  # without which there is no quantile


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_takes_these_arguments(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they do is tested elsewhere: here is neither a server, nor is anything removed."""
    _, name, *arguments = shlex.split(command.partition(" | ")[0])
    ran: list[argparse.Namespace] = []

    def run(parsed: argparse.Namespace) -> int:
        ran.append(parsed)
        return 0

    module = importlib.import_module(f"shm_backend_utils.cli.{name}")
    monkeypatch.setattr(module, "run", run)
    assert cli.main([name, *arguments]) == 0
    assert ran


def test_each_link_leads_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)", TEXT):
        assert (Path(__file__).parents[2] / "docs" / target).is_file()
