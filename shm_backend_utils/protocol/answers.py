"""Checks of an answer against the configuration of the model that gave it, for a client or a model that calls it."""

from __future__ import annotations

from ..dtypes import DType
from ..errors import PeerError, TensorError
from ..model_spec import ModelSpec

__all__ = ["check_output", "missing_output"]


def check_output(spec: ModelSpec, name: str, dtype: DType | None, shape: tuple[int, ...]) -> None:
    """Raise PeerError unless an output that an answer describes is one that the model's configuration has.

    A peer's words become a type or a size nowhere else.
    """
    expected = spec.outputs.get(name)
    if expected is None or dtype is None:
        found = "of a type that Triton does not have" if dtype is None else "which its configuration does not have"
        raise PeerError(f"model {spec.name!r} answered with an output {name!r} {found}")
    try:
        if expected.dtype is None:
            expected.check_shape(shape)
        else:
            expected.check(dtype, shape)
    except TensorError:
        raise PeerError(
            f"output {name!r} of model {spec.name!r} came as {dtype.name} {list(shape)}, and its configuration says "
            f"{expected.config_dtype} {list(expected.shape)}; correct its config.pbtxt or its model.py; if it was just "
            "loaded anew, call it again"
        ) from None


def missing_output(model: str, name: str) -> PeerError:
    """Return the error for an answer without one of the wanted outputs."""
    return PeerError(f"model {model!r} answered without output {name!r}")
