"""The data types of Triton, NumPy and DLPack; and what is read out of a model's configuration."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from shm_backend_utils import dtypes
from shm_backend_utils.dtypes import BF16, DType
from shm_backend_utils.errors import ModelError, PeerError, TensorError
from shm_backend_utils.model.triton import TritonBackend
from shm_backend_utils.model_spec import PATHS_LINE, ModelSpec, TensorSpec
from tests.unit.emulated import start_server

NUMBERS = [dtype for dtype in dtypes.BY_NAME.values() if dtype is not dtypes.BYTES]


def test_the_table_holds_every_type_of_triton() -> None:
    assert list(dtypes.BY_NAME) == [
        *["BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64"],
        *["BF16", "BYTES"],
    ]
    strings = dtypes.BYTES
    assert (strings.numpy, strings.itemsize, strings.dlpack_bits) == (np.dtype(object), 0, 0)
    assert strings.dlpack_code not in {dtype.dlpack_code for dtype in NUMBERS}
    for name in ("TYPE_INVALID", "TYPE_BYTES", "TYPE_FP8", "type_fp32", "", "TYPE_"):
        assert dtypes.BY_CONFIG.get(name) is None


@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
def test_size_kind_and_name_are_the_same_in_numpy_dlpack_and_triton(dtype: DType) -> None:
    kinds = {"BOOL": ("b", 6), "UINT": ("u", 1), "INT": ("i", 0), "FP": ("f", 2), "BF": ("V", 4)}
    assert dtype.itemsize == dtype.numpy.itemsize == dtype.dlpack_bits / 8
    assert (dtype.numpy.kind, dtype.dlpack_code) == kinds[dtype.name.rstrip("0123456789")]
    assert dtype.name == "BOOL" or dtype.name.endswith(str(dtype.dlpack_bits))


@pytest.mark.parametrize("dtype", dtypes.BY_NAME.values(), ids=str)
def test_names_of_numpy_and_of_configurations_lead_to_a_types_row(dtype: DType) -> None:
    assert dtypes.from_numpy(dtype.numpy, "X") is dtype
    assert dtypes.BY_CONFIG["TYPE_STRING" if dtype is dtypes.BYTES else f"TYPE_{dtype.name}"] is dtype


@pytest.mark.parametrize(
    ("name", "aliases"),
    [
        ("FP32", [np.float32]),
        ("FP64", ["float64"]),
        ("INT64", [np.longlong, np.intp]),
        ("BOOL", [bool]),
        ("INT32", ["<i4"]),
        ("BYTES", ["S4", "U4", bytes, str, object]),
        ("BF16", [ml_dtypes.bfloat16]),
    ],
)
def test_whatever_numpy_takes_for_a_type_is_found(name: str, aliases: list[type | str]) -> None:
    assert {dtypes.from_numpy(alias, "X").name for alias in aliases} == {name}


@pytest.mark.parametrize(
    "unsupported",
    [
        *["c8", "M8[s]", "f4,i4", ">f4", ">u2", np.longdouble],
        *["V1", "V3", "V4", "V", ml_dtypes.float8_e5m2, ml_dtypes.int4],
    ],
    ids=str,
)
def test_a_numpy_type_without_a_row_is_refused(unsupported: type | str) -> None:
    with pytest.raises(
        TensorError, match=r"tensor 'IMAGE' has NumPy dtype .*; Triton has BOOL, UINT8, .*, BF16, BYTES: convert it"
    ) as caught:
        dtypes.from_numpy(unsupported, "IMAGE")
    assert caught.value.tensor == "IMAGE"


def test_the_error_tells_which_triton_carries_bf16_and_what_helps_before(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, capsule: object) -> Any:  # as an old Triton does, with 2.41's words
        raise RuntimeError("Dtype is invalid.")

    start_server(monkeypatch)
    backend = TritonBackend()
    monkeypatch.setattr(backend._pb_utils.Tensor, "from_dlpack", refuse)
    with pytest.raises(ModelError) as refusal:
        backend.output("Y", np.zeros((2, 3), BF16.numpy))
    assert str(refusal.value) == (
        "output 'Y' holds BF16, which the Python backend of this Triton refuses (Dtype is invalid.): use Triton "
        '2.49 (24.08) or newer, or have the caller reserve memory for it: outputs={"Y": 12}'
    )
    backend.reads_numpy = False
    with pytest.raises(RuntimeError, match="Dtype is invalid."):  # another type's refusal is told as it is
        backend.output("Y", np.zeros(3, np.float32))


CARRIER = {"name": "SHM", "data_type": "TYPE_UINT8", "dims": [-1], "optional": True}
FP32 = dtypes.BY_NAME["FP32"]


def config(**changes: Any) -> dict[str, Any]:
    return {
        "name": "resize",
        "max_batch_size": 0,
        "input": [{"name": "IMAGE", "data_type": "TYPE_FP32", "dims": [3, -1], "optional": True}],
        "output": [{"name": "OUTPUT0", "data_type": "TYPE_STRING", "dims": [1]}],
        "parameters": {"SHM_PATHS": {"string_value": "direct"}},
    } | changes


def batched(**changes: Any) -> dict[str, Any]:
    return config(max_batch_size=8, input=[*config()["input"], CARRIER]) | changes


def tensor(**changes: Any) -> TensorSpec:
    return ModelSpec.from_config(config(input=[config()["input"][0] | changes])).input("IMAGE")


def paths(declared: Any) -> dict[str, Any]:
    return {"SHM_PATHS": {"string_value": declared}}


def test_names_types_and_shapes_are_read() -> None:
    spec = ModelSpec.from_config(config())
    assert (spec.name, list(spec.inputs), list(spec.outputs)) == ("resize", ["IMAGE"], ["OUTPUT0"])
    assert spec.input("IMAGE") == TensorSpec("IMAGE", "TYPE_FP32", FP32, (3, -1), optional=True)
    assert spec.output("OUTPUT0").dtype is dtypes.BYTES
    assert ModelSpec.from_config(config(output=[{"name": "Y", "dims": [1]}])).output("Y").dtype is None
    assert not ModelSpec.from_config(config(input=[{"name": "X", "dims": []}])).input("X").optional
    assert spec.obstacle_to_direct() is None
    spec = ModelSpec.from_config(batched())
    assert (spec.input("IMAGE").shape, spec.output("OUTPUT0").shape) == ((-1, 3, -1), (-1, 1))
    assert (spec.has_batch_carrier, list(spec.inputs)) == (True, ["IMAGE"])
    assert spec.obstacle_to_direct() is None
    # Integers may be strings, as in protobuf's JSON.
    spec = ModelSpec.from_config(batched(max_batch_size="8", input=[{"name": "X", "dims": ["3", "-1"]}]))
    assert (spec.max_batch_size, spec.input("X").shape) == (8, (-1, 3, -1))


@pytest.mark.parametrize("change", [{"data_type": "TYPE_FP32"}, {"optional": False}, {"dims": [1]}, {"dims": [-1, -1]}])
def test_an_input_that_only_has_the_carriers_name_carries_and_declares_nothing(change: dict[str, Any]) -> None:
    for model in (batched(input=[CARRIER | change]), config(input=[CARRIER])):
        spec = ModelSpec.from_config(model)
        assert (spec.has_batch_carrier, list(spec.inputs)) == (False, ["SHM"])
    for max_batch_size in (0, 8):
        model = config(max_batch_size=max_batch_size, input=[CARRIER | change], parameters={})
        assert ModelSpec.from_config(model).paths is None


@pytest.mark.parametrize("max_batch_size", [0, 8])
def test_a_carrier_declares_every_path_where_no_parameter_declares_any(max_batch_size: int) -> None:
    spec = ModelSpec.from_config(config(max_batch_size=max_batch_size, input=[CARRIER], parameters={}))
    assert spec.paths == frozenset({"direct", "triton-shm", "inline"})
    assert "SHM" not in spec.inputs


@pytest.mark.parametrize(
    ("declared", "expected"),
    [
        ("direct", frozenset({"direct"})),
        ("direct,triton-shm,inline", frozenset({"direct", "triton-shm", "inline"})),
        (" inline ,, direct,", frozenset({"direct", "inline"})),
    ],
)
def test_paths_are_a_list_which_comes_before_a_carrier(declared: str, expected: frozenset[str]) -> None:
    for model in (config, batched):
        assert ModelSpec.from_config(model(parameters=paths(declared))).paths == expected
    for parameters in ({}, {"OTHER": {"string_value": declared}}):
        assert ModelSpec.from_config(config(parameters=parameters)).paths is None


@pytest.mark.parametrize(
    ("declared", "unknown", "meant"),
    [
        ("Direct", "Direct", "direct"),
        ("inline, triton_shm,a", "triton_shm", "triton-shm"),
        ("direct;", "direct;", "direct"),
    ],
)
def test_an_unknown_path_is_an_error_of_the_model(declared: str, unknown: str, meant: str) -> None:
    said = f"has '{unknown}'; expected, separated by commas, some of direct, inline, triton-shm; did you mean '{meant}'"
    with pytest.raises(ModelError, match=f"parameter SHM_PATHS of model 'resize' {said}"):
        ModelSpec.from_config(config(parameters=paths(declared)))
    for empty in ({"string_value": ""}, {"string_value": " , "}, {}):
        with pytest.raises(ModelError, match="is empty; expected, separated by commas, some of"):
            ModelSpec.from_config(config(parameters={"SHM_PATHS": empty}))


@pytest.mark.parametrize(
    ("model", "obstacle", "remedy"),
    [
        (config(parameters={}), "does not declare the direct path", f"add to its config.pbtxt: {PATHS_LINE}"),
        (config(parameters=paths("inline")), "does not declare the direct path", "add direct to SHM_PATHS"),
        (config(input=[{"name": "X", "dims": []}]), "input 'X' of model 'resize' is not", "add `optional: true` to it"),
        (config(max_batch_size=8), "max_batch_size 8 but no input to carry", 'add input { name: "SHM" data_type: TYPE'),
        (
            batched(input=[CARRIER | {"dims": [1]}]),
            "model 'resize' has max_batch_size 8 but input SHM (TYPE_UINT8 [1], optional)",
            'expected { name: "SHM" data_type: TYPE_UINT8 dims: [ -1 ] optional: true } in config.pbtxt',
        ),
    ],
)
def test_an_obstacle_is_named_with_its_remedy(model: dict[str, Any], obstacle: str, remedy: str) -> None:
    message = ModelSpec.from_config(model).obstacle_to_direct()
    assert message is not None
    assert obstacle in message
    assert remedy in message


def test_an_unknown_tensor_is_refused_with_the_names_that_there_are() -> None:
    with pytest.raises(TensorError, match="model 'resize' has no input 'PHOTO'; it has IMAGE") as caught:
        ModelSpec.from_config(config()).input("PHOTO")
    assert caught.value.tensor == "PHOTO"
    with pytest.raises(TensorError, match="model 'resize' has no output 'Y'; it has none"):
        ModelSpec.from_config(config(output=[])).output("Y")


@pytest.mark.parametrize("shape", [(), (3,), (4, 1), (3, 1, 1), (1, 3, 1)])
def test_a_tensor_of_another_shape_or_type_is_refused(shape: tuple[int, ...]) -> None:
    for fitting in ((3, 1), (3, 0), (3, 10**9)):
        tensor().check(FP32, fitting)
    with pytest.raises(TensorError, match="tensor 'IMAGE' is FP64, but the model's configuration says TYPE_FP32"):
        tensor().check(dtypes.BY_NAME["FP64"], (3, 1))
    with pytest.raises(TensorError, match=r"tensor 'IMAGE' has shape .* configuration says \[3, -1\]"):
        tensor().check(FP32, shape)
    for dtype in dtypes.BY_NAME.values():
        with pytest.raises(TensorError, match="configuration says TYPE_INVALID"):
            tensor(data_type="TYPE_INVALID").check(dtype, (3, 1))


@pytest.mark.parametrize(("dims", "byte_size"), [([3, 2], 24), ([], 4), ([0, 5], 0), ([3, -1], None)])
def test_the_size_of_a_tensor_is_known_where_no_dimension_is_open(dims: list[int], byte_size: int | None) -> None:
    assert tensor(dims=dims).row_byte_size == byte_size
    for data_type in ("TYPE_STRING", "TYPE_INVALID"):
        assert tensor(data_type=data_type, dims=dims).row_byte_size is None
    one = {"name": "X", "data_type": "TYPE_FP32", "dims": dims}
    assert ModelSpec.from_config(batched(input=[one])).input("X").row_byte_size == byte_size, "of a row"


ODD_INPUTS: list[Any] = [7, [{}], ["IMAGE"]]
ODD_OUTPUTS: list[Any] = [{"data_type": []}, {"dims": [-2]}, {"dims": [2**63]}]


@pytest.mark.parametrize(
    "told",
    [
        *(None, [], {}, config(name="another"), config(name=7), config(parameters=[]), config(parameters=paths(7))),
        *(config(max_batch_size=wrong) for wrong in (-1, "many", float("inf"))),
        *(config(input=wrong) for wrong in ODD_INPUTS),
        *(config(output=[{"name": wrong}]) for wrong in (7, "", "\ud800")),
        *(config(output=[{"name": "Y", **wrong}]) for wrong in ODD_OUTPUTS),
        config(output=[{"name": "Y", "dims": [1], "reshape": {"shape": [-2]}}]),
    ],
)
def test_what_a_server_says_is_a_configuration_of_this_model_or_the_servers_error(told: Any) -> None:
    with pytest.raises(PeerError, match="description of model 'resize' is not a configuration of it"):
        ModelSpec.of_server("resize", told)
