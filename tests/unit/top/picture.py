"""Draw the picture of ``top`` that the documentation has: ``python -m tests.unit.top.picture docs/images/top.svg``.

The figures are those of a busy machine, made up, so that every kind of line is there.
"""

from __future__ import annotations

import io
import re
import sys
import time
from pathlib import Path
from typing import Final

from rich.console import Console

from shm_backend_utils.cli.shared_memory.pools import BackendPool, PoolFile
from shm_backend_utils.cli.top.metrics import ModelRates
from shm_backend_utils.cli.top.snapshot import ProcessRow, RegionRow, Snapshot, Space
from shm_backend_utils.cli.top.view import view

__all__ = ["SNAPSHOT", "URL", "draw"]

URL: Final = "http://localhost:8002"
MIB: Final = 2**20
NOON_S: Final = time.mktime((2026, 11, 23, 12, 0, 0, 0, 0, -1))


def _model(name: str, direct: float, triton: float, copied: float, **more: float) -> ModelRates:
    return ModelRates(
        name,
        "1",
        instances=1,
        direct_per_s=direct,
        triton_per_s=triton,
        refused_per_s=more.get("refused", 0.0),
        refusals_per_s={"TableError": more["refused"]} if "refused" in more else {},
        zero_copy_bytes_per_s=direct * 2.3 * MIB,
        copied_bytes_per_s=copied * MIB,
        own_s=more["own_us"] / 1e6,
        mapped_bytes=int(more["mapped"]) * MIB,
        mapped_regions=3,
    )


def _pool(number: int, pids: list[int]) -> BackendPool:
    name = f"triton_python_backend_shm_region_5f0c1d7e-6b1a-4f6e-9c55-0e2f4a7d9b1{number}"
    return BackendPool(PoolFile(name, MIB, 0, 60.0, (0, number)), pids, is_left_behind=not pids)


SNAPSHOT: Final = Snapshot(
    taken_s=NOON_S,
    space=Space(8192 * MIB, 8109 * MIB, 21000 * MIB),
    models=[
        _model("image_resize_normalize", 1412, 3.5, 18, own_us=71, mapped=384),
        _model("multiply", 240, 0, 0, own_us=64, mapped=256, refused=0.5),
    ],
    remark="",
    regions=[
        RegionRow("sealed", "inode 221595", 256 * MIB, 0, True, None, 16, 5, (4711, 4820, 4823)),
        RegionRow("sealed", "inode 221702", 128 * MIB, 0, True, None, 8, 1, (4790, 4820)),
        RegionRow("system", "shmbu-4711-5291652791228594", 64 * MIB, 0, True, 754, 4, 0, (4711, 4802)),
        RegionRow("system", "shmbu-3107-0c6e1d9f2ab47730", 16 * MIB, 0, False, 9000, 4, 0, ()),
    ],
    processes=[
        ProcessRow(4820, "stub of image_resize_normalize 1", 2, 384 * MIB),
        ProcessRow(4711, "python", 2, 320 * MIB),
        ProcessRow(4823, "stub of multiply 1", 1, 256 * MIB),
        ProcessRow(4790, "uvicorn", 1, 128 * MIB),
        ProcessRow(4802, "tritonserver", 1, 64 * MIB),
    ],
    pools=[_pool(1, [4802, 4820]), _pool(2, [4802, 4823]), _pool(3, [])],
    is_complete=True,
)


def draw(width: int) -> Console:
    """Return a console of this width that has recorded the picture."""
    console = Console(
        record=True, width=width, file=io.StringIO(), force_terminal=True, color_system="truecolor", highlight=False
    )
    console.print(view(SNAPSHOT, URL, console))
    return console


def as_svg(console: Console) -> str:
    """Return the picture, without the fonts that it would fetch from elsewhere."""
    picture = console.export_svg(title="shm-backend-utils top", unique_id="top")
    return re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(as_svg(draw(110)))
