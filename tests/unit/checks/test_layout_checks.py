"""A call against the configuration, and the room that a slot's record has, one bound at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from shm_backend_utils.dtypes import BY_NAME
from shm_backend_utils.errors import MissingTensorError, TensorShapeError
from shm_backend_utils.model_spec import ModelSpec
from shm_backend_utils.protocol import layout
from shm_backend_utils.protocol.call_layout import CallInput, CallLayout, lay_out, obstacle_in_tensors, record_byte_size

FP32 = BY_NAME["FP32"]


def tensor(name: str, dims: Sequence[int] = (-1,), dtype: str = "FP32", **more: Any) -> dict[str, Any]:
    return {"name": name, "data_type": f"TYPE_{dtype}", "dims": list(dims), **more}


def spec(inputs: Sequence[dict[str, Any]], outputs: Sequence[dict[str, Any]] = (), **more: Any) -> ModelSpec:
    return ModelSpec.from_config({"name": "m", "input": list(inputs), "output": list(outputs), **more})


def laid_out(
    spec: ModelSpec, shape: tuple[int, ...], wanted: Any = None, learned: Any = None, rows: int = 8
) -> CallLayout:
    return lay_out(spec, {"X": CallInput(FP32, shape, 64)}, wanted, 4096, learned=learned or {}, most_rows=rows)


@pytest.mark.parametrize("shape", [(4, 3), (-1, 2), (-2, 2), (5, 2), (0, 3)])
def test_a_shape_that_the_configuration_forbids_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(TensorShapeError):
        laid_out(spec([tensor("X", [-1, 2] if shape[0] < 4 else [4, 2])]), shape)


def test_an_empty_tensor_is_laid_out() -> None:
    assert laid_out(spec([tensor("X", [-1, 2])]), (0, 2)).table.inputs["X"].shape == (0, 2)


def test_optional_inputs_may_be_missing_and_others_not() -> None:
    assert laid_out(spec([tensor("X"), tensor("Z", optional=True)]), (1,)).batch_size is None
    with pytest.raises(MissingTensorError, match="needs input 'Z'"):
        laid_out(spec([tensor("X"), tensor("Z")]), (1,))
    found = laid_out(spec([tensor("A", optional=True), tensor("X"), tensor("Z", optional=True)]), (1,))
    assert list(found.table.inputs) == ["X"]


def test_an_output_whose_type_nobody_knows_gets_no_room() -> None:
    found = laid_out(spec([tensor("X")], [tensor("Y", [4]), tensor("Z", [4], "UNHEARD_OF")]), (1,))
    assert list(found.table.outputs) == ["Y"]


def names_of(byte_size: int) -> ModelSpec:
    """Return a model with so many bytes of names of inputs."""
    names: list[str] = []
    left = byte_size
    while left:
        length = min(left, 60_000)
        names.append(f"{len(names)}".ljust(length, "x"))
        left -= length
    return spec([tensor(name) for name in names])


def least_names_for(size: int) -> int:
    """Return with how many bytes of names a record gets larger than ``size``."""
    few, many = 1, size
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (middle, many) if record_byte_size(names_of(middle)) <= size else (few, middle)
    return many


def test_a_record_is_as_small_as_can_be() -> None:
    least = least_names_for(layout.PAGE_SIZE)
    room = layout.PAGE_SIZE // 2
    # 32 bytes of head, 32 of the tensor, 5 times 96 kept for further regions.
    assert (least - 1) == room - 32 - 32 - 5 * 160 - 96
    assert record_byte_size(names_of(least - 1)) == layout.PAGE_SIZE
    assert record_byte_size(names_of(least)) == 2 * layout.PAGE_SIZE


def test_names_of_tensors_may_have_65535_bytes_and_no_more() -> None:
    assert "a name of more than" not in str(obstacle_in_tensors(spec([tensor("x" * 65_535)])))
    assert "a name of more than 65535 bytes" in str(obstacle_in_tensors(spec([tensor("x" * 65_536)])))


def test_names_may_fill_the_largest_record_and_not_more() -> None:
    few, many = 1, layout.MAX_RECORD_BYTE_SIZE
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (middle, many) if obstacle_in_tensors(names_of(middle)) is None else (few, middle)
    count = -(-few // 60_000)
    assert few == layout.MAX_RECORD_BYTE_SIZE // 2 - 32 - 32 * count - 5 * 160 - 96 * count
