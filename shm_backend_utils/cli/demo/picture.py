"""Draw the photographs and what the model made of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
import numpy as np
import numpy.typing as npt

from .measurement import Measurement
from .photographs import Photograph

mpl.use("agg")
from matplotlib import pyplot as plt  # after the choice of a backend that needs no display

__all__ = ["draw"]

_INK: Final = "#1f2933"
_FAINT: Final = "#7b8794"
_TILE_INCHES: Final = 1.4


def draw(file: Path, photographs: dict[str, Photograph], measurement: Measurement) -> None:
    """Write the picture: photographs above, the model's outputs below; OSError if it cannot be written there."""
    aspects = [photograph.shape[1] / photograph.shape[0] for photograph in photographs.values()]
    figure, axes = plt.subplots(
        2,
        len(photographs),
        figsize=(_TILE_INCHES * (sum(aspects) + 0.09 * len(aspects) + 0.5), _TILE_INCHES * 3.05),
        gridspec_kw={"width_ratios": aspects},
        squeeze=False,
    )
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
    finally:
        plt.close(figure)


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
    """Scale what has negative numbers to 0…1, and put the channels last."""
    low, high = normalized.min(), normalized.max()
    return np.moveaxis((normalized - low) / max(high - low, np.finfo(np.float32).tiny), 0, -1)
