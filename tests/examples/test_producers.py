"""Several processes feed one model, each with a client of its own."""

from __future__ import annotations

from examples.producers.client import rate, run
from examples.producers.measure import measure

from .recipes import run_script


def test_every_producer_gets_the_answers_to_its_own_windows(url: str) -> None:
    done = run(url, producers=3, windows=8)
    assert [each.windows for each in done] == [8, 8, 8]
    assert [each.highest for each in done] == [0.875, 1.875, 2.875]
    assert rate(done) > 0


def test_the_script_says_how_many_windows_there_were(url: str) -> None:
    printed = run_script("producers/client.py", url)
    assert printed.startswith("4 producers, ")
    assert "windows a second" in printed


def test_it_is_measured_and_finds_what_the_stock_model_finds(url: str) -> None:
    assert min(measure(url, rounds=1, producers=2, windows=2).values()) > 0
