"""Measure all paths, and show the results: a table, one line of JSON, and a picture."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from tritonclient.utils import InferenceServerException

from ...errors import ShmError
from ..common.server import temporary_server
from ..terminal import exit_status
from .paths import PATHS, WARM_UP_ROUNDS, Measurement, Photograph, load_photographs, measure, measure_wire_bytes

__all__ = ["show"]

_INK: Final = "#1f2933"
_FAINT: Final = "#7b8794"
_TILE_INCHES: Final = 1.4


def show(url: str | None, rounds: int, picture: Path) -> int:
    """Run the demo; return its exit status."""
    return exit_status(lambda: _show_all(url, rounds, picture), ShmError, InferenceServerException)


def _show_all(url: str | None, rounds: int, picture: Path) -> int:
    _require_folder_for(picture)
    photographs = load_photographs()
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(bar)
        task = bar.add_task("starting the server", total=None)
        if url is None:
            url = stack.enter_context(temporary_server("demo")).grpc_url
        bar.update(task, description="measuring, all paths in every round", total=WARM_UP_ROUNDS + rounds)
        measurement = measure(url, photographs, rounds, lambda: bar.advance(task))
        bar.update(task, description="counting bytes")
        wire_bytes = measure_wire_bytes(url, photographs)
    _report(measurement, wire_bytes)
    _draw(picture, photographs, measurement)
    if measurement.differing:
        print(f"the paths' results differ for: {', '.join(sorted(measurement.differing))}", file=sys.stderr)
        return 1
    return 0


def _require_folder_for(picture: Path) -> None:
    """Raise OSError if the picture cannot be written there, before any time is spent on measuring."""
    if picture.is_dir() or not os.access(picture if picture.exists() else picture.absolute().parent, os.W_OK):
        raise PermissionError(f"cannot write the picture to {picture}; choose another file with --picture FILE")


def _report(measurement: Measurement, wire_bytes: dict[str, dict[str, int]]) -> None:
    """Print the table, and one line of JSON."""
    table = Table(
        title=f"{len(measurement.outputs)} photographs, one per request, over gRPC; copies of the tensors' data",
        title_justify="left",
    )
    table.add_column("path")
    for column in ("bytes over the wire", "median ms", "p99 ms"):
        table.add_column(column, justify="right")
    table.add_column("copies")
    for path in PATHS:
        counts = wire_bytes[path.name].values()
        table.add_row(
            path.name,
            f"{min(counts):,} to {max(counts):,}" if min(counts) != max(counts) else f"{min(counts):,}",
            f"{measurement.percentile(path.name, 50):.2f}",
            f"{measurement.percentile(path.name, 99):.2f}",
            path.copies,
        )
    Console().print(table)
    medians = {path.name: round(measurement.percentile(path.name, 50), 4) for path in PATHS}
    summary = {
        "identical": not measurement.differing,
        "direct_ms": medians["direct"],
        "triton_shm_ms": medians["triton-shm"],
        "inline_ms": medians["inline"],
        "empty_ms": medians["empty"],
        "wire_bytes": {
            key: round(statistics.median(wire_bytes[path].values()))
            for key, path in (("direct", "direct"), ("triton_shm", "triton-shm"), ("inline", "inline"))
        },
    }
    print(json.dumps(summary), flush=True)


def _draw(file: Path, photographs: dict[str, Photograph], measurement: Measurement) -> None:
    """Write the picture: photographs above, the model's outputs below; OSError if it cannot be written there."""
    aspects = [photograph.shape[1] / photograph.shape[0] for photograph in photographs.values()]
    figure = Figure((_TILE_INCHES * (sum(aspects) + 0.09 * len(aspects) + 0.5), _TILE_INCHES * 3.05))
    axes = figure.subplots(2, len(photographs), gridspec_kw={"width_ratios": aspects}, squeeze=False)
    figure.subplots_adjust(left=0.035, right=0.99, top=0.795, bottom=0.125, wspace=0.07, hspace=0.07)
    for above, below, (name, photograph) in zip(axes[0], axes[1], photographs.items(), strict=True):
        _show(above, photograph)
        above.set_title(name, fontsize=10, color=_INK, pad=6)
        _show(below, _as_picture(measurement.outputs[name]))
    for axis, words in zip(axes[:, 0], ("photograph", "model's output"), strict=True):
        axis.set_ylabel(words, fontsize=9, color=_FAINT, labelpad=7)
    figure.suptitle(
        "Resized and normalized by a Triton model that reads and writes the client's memory",
        fontsize=14,
        color=_INK,
        y=0.965,
    )
    figure.text(0.5, 0.04, _caption(measurement), fontsize=10.5, color=_FAINT, ha="center")
    try:
        figure.savefig(file, dpi=100)
    except OSError as error:
        raise OSError(f"the picture cannot be written to {file}: {error}") from error


def _caption(measurement: Measurement) -> str:
    medians = [f"{path} {measurement.percentile(path, 50):.2f} ms" for path in ("direct", "triton-shm", "inline")]
    same = "differ" if measurement.differing else "are equal to the byte"
    return f"one request: {'   ·   '.join(medians)}   (medians)   —   the three paths' outputs {same}"


def _show(axis: Any, image: npt.NDArray[Any]) -> None:
    axis.imshow(image, interpolation="lanczos")
    axis.set_xticks([])
    axis.set_yticks([])
    for spine in axis.spines.values():
        spine.set_visible(False)


def _as_picture(normalized: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Scale a picture with negative numbers to 0…1, and put the channels last."""
    low, high = normalized.min(), normalized.max()
    return np.moveaxis((normalized - low) / max(high - low, np.finfo(np.float32).tiny), 0, -1)
