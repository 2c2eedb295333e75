"""Checks of an answer against the configuration of the model that gave it, for a client or a model that calls it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..dtypes import DType
from ..errors import PeerError, TensorError
from ..model_spec import ModelSpec
from .results import OutputPlace

__all__ = ["check_output", "check_places", "missing_output"]


def check_output(spec: ModelSpec, name: str, dtype: DType | None, shape: tuple[int, ...]) -> None:
    """Raise PeerError unless an output that an answer describes is one that the model's configuration has.

    What a peer says never becomes a type or a size otherwise.
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


def check_places(spec: ModelSpec, wanted: Iterable[str], places: Sequence[OutputPlace]) -> None:
    """Raise PeerError unless the model answered with every output that was wanted, as its configuration has them."""
    names = set()
    for name, dtype, shape, *_ in places:
        names.add(name)
        expected = spec.outputs.get(name)
        if (  # what check_output() does, without the functions around it
            expected is None
            or dtype is not expected.dtype
            or len(shape) != len(expected.shape)
            or (expected.fixed_end and shape[-len(expected.fixed_end) :] != expected.fixed_end)
        ):
            check_output(spec, name, dtype, shape)
    for name in wanted:
        if name not in names:
            raise missing_output(spec.name, name)


def missing_output(model: str, name: str) -> PeerError:
    """Return the error for an answer without one of the wanted outputs."""
    return PeerError(f"model {model!r} answered without output {name!r}")
