"""Real photographs, out of scikit-image's own package."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import skimage
from skimage import io

__all__ = ["Photograph", "load_photographs"]

Photograph = npt.NDArray[np.uint8]
"""Height, width, RGB."""

_FILES: Final = {
    "astronaut": "astronaut.png",
    "cat": "chelsea.png",
    "coffee": "coffee.png",
    "rocket": "rocket.jpg",
    "motorcycle": "motorcycle_left.png",
    "tissue": "ihc.png",
    "deep field": "hubble_deep_field.jpg",
    "retina": "retina.jpg",
}


def load_photographs() -> dict[str, Photograph]:
    """Return the photographs by name; FileNotFoundError if the package has none of them.

    The files are read where the package has them: scikit-image's own functions would download those that a release
    leaves out, and this is to work without a network.
    """
    folder = Path(skimage.__file__).parent / "data"
    files = {name: folder / file for name, file in _FILES.items()}
    photographs = {name: _read(file) for name, file in files.items() if file.is_file()}
    if not photographs:
        raise FileNotFoundError("scikit-image has no photographs in its package")
    return photographs


def _read(file: Path) -> Photograph:
    without_alpha = io.imread(file)[:, :, :3]
    return np.ascontiguousarray(without_alpha, np.uint8)
