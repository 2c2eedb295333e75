"""What ``explain()`` and ``stats()`` show at a prompt, and in a notebook."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from shm_backend_utils.client import Check, ClientStats, Explanation
from shm_backend_utils.client.text_table import TextTable

NASTY = "it says: <script>&\n\tno"
EXPLANATION = Explanation(
    "m<1>",
    "inline",
    NASTY,
    (
        Check("declares direct?", False, NASTY, ("direct",)),
        Check("a name that is longer than all of the others?", None, "nobody knows", ()),
        Check("here?", True, "yes", ()),
    ),
)
STATS = ClientStats(1234567, 1, 0, 2**30, {"direct": 1234, "inline": 3}, {"m": f"direct: {NASTY}"}, 0, 1, 2, 3, 4, 5)


def test_an_explanation_is_shown_as_a_table() -> None:
    assert repr(EXPLANATION).splitlines() == [
        "model 'm<1>' takes the path inline: it says: <script>& no",
        "  declares direct?                               no       it says: <script>& no",
        "  a name that is longer than all of the others?  unknown  nobody knows",
        "  here?                                          yes      yes",
    ]


def test_figures_are_shown_as_a_table() -> None:
    title, *lines = repr(STATS).splitlines()
    assert title == "what the client has done"
    assert "  requests        1,234,567" in lines
    assert "  bytes_avoided   1,073,741,824" in lines
    assert "  paths direct    1,234" in lines
    assert "  reasons m       direct: it says: <script>& no" in lines
    assert len({line.index(line.split()[-1]) for line in lines if "reasons" not in line}) == 1


@pytest.mark.parametrize("shown", [EXPLANATION, STATS], ids=["explanation", "stats"])
def test_printed_it_is_the_same(shown: object) -> None:
    assert str(shown) == repr(shown)


@pytest.mark.parametrize("shown", [EXPLANATION, STATS], ids=["explanation", "stats"])
def test_in_a_notebook_it_is_a_table_in_which_nothing_is_markup(shown: Explanation | ClientStats) -> None:
    page = shown._repr_html_()
    table = ET.fromstring(page)
    rows = table.findall("tbody/tr")
    assert len(rows) == len(str(shown).splitlines()) - 1
    assert len({len(row.findall("td")) for row in rows}) == 1
    assert NASTY in (table.findtext("caption") or "") or any(NASTY in (cell.text or "") for cell in table.iter("td"))
    assert "<script>" not in page


def test_a_table_without_rows_is_its_title() -> None:
    assert str(TextTable("nothing", [])) == "nothing"
    assert ET.fromstring(TextTable("nothing", []).html()).findtext("caption") == "nothing"


def test_an_explanation_without_checks_can_be_shown() -> None:
    assert repr(Explanation("m", None, "", ())) == "model 'm' takes the path None:"
