"""Write the network of this recipe: a 3×3 filter that sharpens each channel of a picture. ONNX all the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

FILE = Path(__file__).with_name("model_repository") / "sharpen" / "1" / "model.onnx"
SHARPENS = np.array([[0, -1, 0], [-1, 5, -1], [0, -1, 0]], np.float32)


def network() -> onnx.ModelProto:
    """Return the network."""
    weights = np.stack([SHARPENS[np.newaxis]] * 3)  # one filter for each channel
    shape: list[str | int | None] = ["batch", 3, "height", "width"]
    graph = helper.make_graph(
        [helper.make_node("Conv", ["x", "w"], ["y"], group=3, pads=[1, 1, 1, 1])],
        "sharpen",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
        [numpy_helper.from_array(weights, "w")],
    )
    # Old versions of both formats, which every ONNX Runtime of the last years reads.
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)


if __name__ == "__main__":
    onnx.save(network(), FILE)
