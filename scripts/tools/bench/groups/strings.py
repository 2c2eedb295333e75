"""What reading a tensor of strings takes, beside Triton's own decoder in the Python backend."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any, Final

import numpy as np

from shm_backend_utils.server import install
from shm_backend_utils.tensors.strings import Strings

from ...common.figures import Figure
from ..rounds import Bench

__all__ = ["strings"]

COUNT: Final = 100_000
LENGTH: Final = 20
TIMES_AS_LONG: Final = 1.0
OURS, AS_LIST, TRITONS = "as an array", "one after another", "pb_utils.deserialize_bytes_tensor"


def strings(bench: Bench) -> list[Figure]:
    """Measure it. Both copy the bytes first: Triton's decoder takes a ``bytes`` object, which the stub makes for it."""
    elements = np.random.default_rng(0).bytes(COUNT * LENGTH)
    words = np.array([elements[begin : begin + LENGTH] for begin in range(0, len(elements), LENGTH)], object)
    encoded = Strings.of("WORDS", words).encoded
    deserialize = _pb_utils().deserialize_bytes_tensor
    assert (deserialize(encoded.tobytes()) == Strings.encoded_as("WORDS", encoded, words.shape).numpy()).all()
    what = f"decoding {COUNT:,} strings of {LENGTH} bytes"
    medians = bench.measure(
        what,
        {
            OURS: lambda: Strings.encoded_as("WORDS", encoded, words.shape).numpy(),
            AS_LIST: lambda: list(Strings.encoded_as("WORDS", encoded, words.shape)),
            TRITONS: lambda: deserialize(encoded.tobytes()),
        },
    )
    return [
        medians.ratio(f"{what} {case}, of what {TRITONS} takes", case, TRITONS, "×", at_most=TIMES_AS_LONG)
        for case in (OURS, AS_LIST)
    ]


def _pb_utils() -> Any:
    """Return the part of the Python backend that is written in Python, as the server's stubs load it."""
    file = Path(install().backends) / "python" / "triton_python_backend_utils.py"
    spec = importlib.util.spec_from_file_location("triton_python_backend_utils", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
