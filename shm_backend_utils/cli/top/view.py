"""How a snapshot is drawn on a terminal: tables that fit its width and its height."""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..wording import OWNER, age, printable, size, user
from .metrics import ModelRates
from .snapshot import ProcessRow, RegionRow, Snapshot

__all__ = ["view"]

_WIDE: Final = 100
"""From how many columns on there is room for ages, and for what models have mapped."""
_STYLES: Final = {"alive": "green", "dead": "bold red", "unknown": "yellow"}
_NEARLY_FULL: Final = 0.9
_USUAL_NAME: Final = 32
_MOST_PROCESSES: Final = 8


def view(snapshot: Snapshot, metrics_url: str, console: Console, most_lines: int | None = None) -> RenderableType:
    """Return a snapshot as it is drawn.

    Parameters
    ----------
    snapshot : Snapshot
        What was found.
    metrics_url : str
        Where the models' figures are from.
    console : Console
        Whose width it is for.
    most_lines : int, optional
        How many lines there are. Regions that find no room are left out, and it is said how many.
    """
    wide = console.width >= _WIDE
    above = [_title(snapshot), *_requests(snapshot, metrics_url, wide=wide)]
    below = [*_processes(snapshot.processes), *_pools(snapshot)]
    if most_lines is None:
        return Group(*above, *_regions(snapshot, len(snapshot.regions), wide=wide), *below)
    room = most_lines - _height(console, above) - _height(console, below)

    def height(count: int) -> int:
        return _height(console, _regions(snapshot, count, wide=wide))

    counts = range(min(len(snapshot.regions), max(room, 0)) + 1)
    shown = max(bisect_right(counts, room, key=height) - 1, 0)
    return Group(*above, *_regions(snapshot, shown, wide=wide), *below)


def _height(console: Console, parts: Iterable[RenderableType]) -> int:
    return len(console.render_lines(Group(*parts), pad=False))


def _title(snapshot: Snapshot) -> Text:
    space = snapshot.space
    line = Text()
    line.append("shm-backend-utils top", "bold")
    line.append(time.strftime("  %H:%M:%S  ", time.localtime(snapshot.taken_s)))
    if space.shm_bytes is None or space.shm_free_bytes is None:
        line.append("no /dev/shm", "bold red")
    elif math.isfinite(space.shm_free_bytes):
        used = space.shm_bytes - space.shm_free_bytes
        share = used / space.shm_bytes
        line.append(f"/dev/shm {size(used)} of {size(space.shm_bytes)}", "bold red" if share > _NEARLY_FULL else "")
    else:
        line.append("/dev/shm without a limit")
    if math.isfinite(space.available_bytes):
        line.append(f"  free memory {size(space.available_bytes)}")
    return line


def _heading(text: str, detail: str = "") -> Text:
    line = Text("\n")
    line.append(text, "bold cyan")
    line.append(f"  {detail}" if detail else "")
    return line


def _table(*columns: tuple[str, str]) -> Table:
    """Return a table of columns that are aligned to the left or to the right. Long words go on in the next line."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim", show_edge=False)
    for title, justify in columns:
        table.add_column(title, justify="right" if justify == "right" else "left", overflow="fold")
    return table


def _requests(snapshot: Snapshot, metrics_url: str, *, wide: bool) -> list[RenderableType]:
    if not snapshot.models:
        return [_heading("REQUESTS"), Text(printable(snapshot.remark), "yellow")]
    columns: list[tuple[str, str, Callable[[ModelRates], str]]] = [
        ("DIRECT/s", "right", lambda model: _rate(model.direct_per_s)),
        ("TRITON/s", "right", lambda model: _rate(model.triton_per_s)),
        ("REFUSED/s", "right", lambda model: _rate(model.refused_per_s)),
        ("NOT COPIED/s", "right", lambda model: _bytes(model.zero_copy_bytes_per_s)),
        ("COPIED/s", "right", lambda model: _bytes(model.copied_bytes_per_s)),
    ]
    if wide:
        columns += [
            ("OWN TIME", "right", lambda model: "-" if model.own_s is None else f"{model.own_s * 1e6:.0f} us"),
            ("MAPS", "right", lambda model: size(model.mapped_bytes)),
            ("INSTANCES", "right", lambda model: str(model.instances)),
        ]
    table = _table(("MODEL", "left"), *((title, justify) for title, justify, _ in columns))
    for model in snapshot.models:
        name = f"{printable(model.model)} {printable(model.version)}"
        table.add_row(Text(name), *(Text(cell(model)) for _, _, cell in columns))
    refusals = [
        Text(f"{printable(model.model)} refuses: {printable(reason)} {_rate(rate)}/s", "red")
        for model in snapshot.models
        for reason, rate in sorted(model.refusals_per_s.items())
    ]
    return [_heading("REQUESTS", f"of models with SHM_METRICS, at {printable(metrics_url)}"), table, *refusals]


def _regions(snapshot: Snapshot, shown: int, *, wide: bool) -> list[RenderableType]:
    regions = snapshot.regions
    dead = sum(region.is_owner_alive is False for region in regions)
    total = size(sum(region.byte_size for region in regions))
    heading = _heading("REGIONS", f"{len(regions)}, {total}; {dead} with a dead owner")
    if any(region.is_owner_alive is False and region.kind == "system" for region in regions):
        heading.append("; `shm-backend-utils regions --reap` removes this user's", "bold red")
    if not snapshot.is_complete:
        heading.append("; processes that this user may not snapshot into may hold more", "yellow")
    table = _table(
        ("REGION", "left"),
        ("SIZE", "right"),
        ("SLOTS IN USE", "right"),
        ("OWNER", "left"),
        *([("AGE", "right")] if wide else []),
        ("USED BY", "left"),
    )
    # The list of processes goes on in the next line before a name does, unless somebody has made a name that fills it.
    table.columns[0].no_wrap = all(len(region.name) <= _USUAL_NAME for region in regions)
    for region in regions[:shown]:
        table.add_row(*_region_cells(region, wide=wide))
    parts: list[RenderableType] = [heading]
    if shown:
        parts.append(table)
    if shown < len(regions):
        rest = size(sum(region.byte_size for region in regions[shown:]))
        parts.append(Text(f"and {len(regions) - shown} more, {rest}", "dim"))
    return parts


def _region_cells(region: RegionRow, *, wide: bool) -> list[Text]:
    state = OWNER[region.is_owner_alive]
    whose = "" if region.uid is None else f" {printable(user(region.uid))}"
    cells = [
        Text(f"sealed, {region.name}" if region.kind == "sealed" else printable(region.name)),
        Text(size(region.byte_size)),
        Text(f"{region.slots_in_use}/{region.slot_count}", "bold" if region.slots_in_use else ""),
        Text.assemble((state, _STYLES[state]), whose),
    ]
    if wide:
        cells.append(Text("-" if region.age_s is None else age(region.age_s)))
    cells.append(Text(" ".join(map(str, region.pids)) or "-"))
    return cells


def _processes(processes: list[ProcessRow]) -> list[RenderableType]:
    if not processes:
        return []
    table = _table(("PID", "right"), ("PROGRAM", "left"), ("REGIONS", "right"), ("MAPPED", "right"))
    for process in processes[:_MOST_PROCESSES]:
        table.add_row(
            str(process.pid), Text(printable(process.program)), str(process.regions), size(process.mapped_bytes)
        )
    parts: list[RenderableType] = [_heading("PROCESSES", f"{len(processes)} that have regions mapped"), table]
    rest = processes[_MOST_PROCESSES:]
    if rest:
        parts.append(Text(f"and {len(rest)} more, {size(sum(each.mapped_bytes for each in rest))}", "dim"))
    return parts


def _pools(snapshot: Snapshot) -> list[RenderableType]:
    if not snapshot.pools:
        return []
    left = [pool for pool in snapshot.pools if pool.is_left_behind]
    total = size(sum(pool.file.byte_size for pool in snapshot.pools))
    heading = _heading("POOLS", f"{len(snapshot.pools)} of Triton's Python backend, {total}")
    if left:
        lost = size(sum(pool.file.byte_size for pool in left))
        heading.append(f"; {len(left)} left behind, {lost}: `shm-backend-utils regions` names them", "bold red")
    return [heading]


def _rate(per_s: float | None) -> str:
    if per_s is None:
        return "-"
    return f"{per_s:,.0f}" if per_s >= 10 or not per_s else f"{per_s:.1f}"


def _bytes(per_s: float | None) -> str:
    return "-" if per_s is None else size(per_s)
