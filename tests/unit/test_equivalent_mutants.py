"""The list of mutants that nobody can tell from the library speaks of the library as it is."""

from __future__ import annotations

from scripts.tools.mutants.__main__ import equivalents, mutants_of


def test_every_change_that_is_listed_can_still_be_made() -> None:
    assert equivalents() - {(mutant.file, mutant.function, mutant.change) for mutant in mutants_of([])} == set()
