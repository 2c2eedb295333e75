"""Figures that other pages quote are those of the bench's page: who refreshes that one refreshes all."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parents[2]
BATCHES: Final = (1, 2, 8, 16)
UPLOADS: Final = "{}: uploads of around {}, {}, shapes varying"

Quotes = dict[str, list[str]]
"""Lines of a page, with places for figures; and the measures of the bench that these are of."""

README: Final[Quotes] = {
    f"| {size} | {{:.2f}} | an empty request |": [f"grpc: identity of {size}, in place"] for size in ("1 MiB", "1 GiB")
}
INDEX: Final[Quotes] = {
    "| identity of 128 MiB, gRPC | {:.2f} | an empty request |": ["grpc: identity of 128 MiB, in place"],
    "| identity of 1 GiB, gRPC | {:.2f} | an empty request |": ["grpc: identity of 1 GiB, in place"],
    "| identity of 1 GiB, HTTP | {:.2f} | an empty request |": ["http: identity of 1 GiB, in place"],
    "| ×2 on `[16, 3, 224, 224]`, gRPC | {:.2f} |": ["grpc: ×2 on [16, 3, 224, 224], in place"],
    "| ×2 on `[16, 3, 224, 224]`, HTTP | {:.2f} |": ["http: ×2 on [16, 3, 224, 224], in place"],
    "| `infer`: times as fast as `triton-shm-client` 0.1.0 | {:.1f} | {:.1f} | {:.1f} | {:.1f} |": [
        f"infer, multiply, batch {batch}" for batch in BATCHES
    ],
    "| `prepare`, filled in place: the same | {:.1f} | {:.1f} | {:.1f} | {:.1f} |": [
        f"prepare, multiply, batch {batch}" for batch in BATCHES
    ],
}
WHEN_NOT: Final[Quotes] = {
    **{
        f"| of {size}, shapes varying | {{:.2f}} |": [f"infer, around {size}, shapes varying"]
        for size in ("1 KiB", "4 KiB", "64 KiB")
    },
    "| of 1 KiB by a plain client to a model with a `ShmSession` | {:.2f} |": ["a plain client, 1 KiB in band"],
    **{
        f"| 16 threads, around {size} | {{:.2f}} |": [f"16 threads, around {size}, shapes varying"]
        for size in ("1 KiB", "16 KiB")
    },
    "| uploads of around 50 KB, 4 threads, gRPC | {:.2f} |": [UPLOADS.format("grpc", "50 KB", "4 threads")],
    "| uploads of around 1 MB, 1 thread, gRPC | {:.2f} |": [UPLOADS.format("grpc", "1 MB", "1 thread")],
    "| uploads of around 1 MB, 4 threads, gRPC | {:.2f} |": [UPLOADS.format("grpc", "1 MB", "4 threads")],
    "| uploads of around 1 MB, 4 threads, HTTP | {:.2f} |": [UPLOADS.format("http", "1 MB", "4 threads")],
}
MIGRATING: Final[Quotes] = {
    "| `multiply`, with a `ShmSession`: times as fast | {:.1f} | {:.1f} | {:.1f} | {:.1f} |": [
        f"infer_shm, multiply, batch {batch}" for batch in BATCHES
    ],
    "| a model without: its time over triton-shm-client's | {:.2f} | {:.2f} | {:.2f} | {:.2f} |": [
        f"infer_shm, a model without a session, batch {batch}" for batch in BATCHES
    ],
}
FAST: Final = " [{:.0f} times as fast](../bench.md)"
BATCHES_PAGE: Final[Quotes] = {
    f"8 calls at once of `[3, 1080, 1920]` are{FAST}": ["8 calls at once of [3, 1080, 1920], ×2, side by side"]
}
FORWARD_PAGE: Final[Quotes] = {
    f"An identity of 64 MiB by `call.forward` is{FAST}": ["BLS identity of 64 MiB by call.forward, in model.py"]
}
FIRST_STREAM: Final = "a client's first stream of 1,000 frames of 1 MB, whose size it is told"
STREAMS_PAGE: Final[Quotes] = {f"A client's first stream of 1,000 frames of 1 MB is{FAST}": [FIRST_STREAM]}
PAGES: Final = {
    "README.md": README,
    "docs/index.md": INDEX,
    "docs/when-not-to-use.md": WHEN_NOT,
    "docs/migrating.md": MIGRATING,
    "docs/howto/batches.md": BATCHES_PAGE,
    "docs/howto/forward.md": FORWARD_PAGE,
    "docs/howto/streams.md": STREAMS_PAGE,
}


def figures() -> dict[str, float]:
    """Return the bench's figures by what was measured: the first one, where one measure has several."""
    found: dict[str, float] = {}
    rows = re.findall(r"^\| ([^|]+) \| (-?[\d.,]+) \| ", (ROOT / "docs" / "bench.md").read_text(), re.MULTILINE)
    for measure, figure in rows:
        found.setdefault(measure, float(figure.replace(",", "")))
    return found


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_quotes_is_what_was_measured(page: str) -> None:
    found, text = figures(), (ROOT / page).read_text()
    expected = [line.format(*(found[measure] for measure in measures)) for line, measures in PAGES[page].items()]
    assert [line for line in expected if line not in text] == []
