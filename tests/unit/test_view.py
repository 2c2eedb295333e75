"""TensorView: a tensor where it lies, for any array library."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from shm_backend_utils import dtypes
from shm_backend_utils.dtypes import DType
from shm_backend_utils.errors import TensorTypeError
from shm_backend_utils.model.delivered import DeliveredView
from shm_backend_utils.tensors import dlpack
from shm_backend_utils.tensors.attributes import BufferAttributes, MemoryType
from shm_backend_utils.tensors.strings import Strings
from shm_backend_utils.tensors.strings_view import StringsView
from shm_backend_utils.tensors.view import TensorView

NUMPY_SPEAKS_VERSIONS = np.lib.NumpyVersion(np.__version__) >= "2.1.0"
every_dtype = pytest.mark.parametrize("dtype", dtypes.BY_NAME.values(), ids=list(dtypes.BY_NAME))
needs_versions = pytest.mark.skipif(not NUMPY_SPEAKS_VERSIONS, reason="NumPy knows versioned capsules since 2.1")


def view_of(array: npt.NDArray[Any], *, writable: bool = True) -> TensorView:
    memory = array.view()
    memory.flags.writeable = writable
    return TensorView("IMAGE", memory, dtypes.from_numpy(array.dtype, "IMAGE"), "direct")


def numpy_takes(view: Any) -> npt.NDArray[Any]:
    taken: npt.NDArray[Any] = np.from_dlpack(view)
    return taken


def floats() -> npt.NDArray[np.float32]:
    return np.array([[0, 1, 2], [3, 4, 5]], np.float32)


@every_dtype
def test_a_view_knows_its_tensor(dtype: DType) -> None:
    view = view_of(np.zeros((2, 3), dtype.numpy))
    assert (view.name, view.path, view.shape) == ("IMAGE", "direct", (2, 3))
    assert (view.dtype, view.triton_dtype) == (dtype.numpy, dtype.name)
    assert repr(view) == f"<TensorView 'IMAGE' {dtype.name} [2, 3] path=direct>"
    assert view.__dlpack_device__() == (1, 0)


@pytest.mark.parametrize(("shape", "nbytes"), [((2, 3), 24), ((), 4), ((0, 3), 0)])
def test_a_view_knows_where_its_bytes_lie_and_how_many_they_are(shape: tuple[int, ...], nbytes: int) -> None:
    assert view_of(np.zeros(shape, np.float32)).attributes == BufferAttributes(MemoryType.CPU, 0, nbytes, None)


def test_a_view_does_not_change_with_one_of_its_arrays() -> None:
    view = view_of(floats())
    view.numpy().flags.writeable = False
    assert view.writable
    assert view.numpy() is not view.numpy()


@pytest.mark.parametrize("take", [TensorView.numpy, numpy_takes], ids=["numpy", "another library"])
def test_an_array_made_from_a_view_outlives_it(take: Any) -> None:
    array = floats()
    alive = weakref.ref(array)
    view = view_of(array)
    taken = take(view)
    array[1, 2] = 50
    assert taken[1, 2] == 50
    del array, view
    assert alive() is not None
    del taken
    assert alive() is None


def test_only_a_view_of_strings_has_strings() -> None:
    with pytest.raises(TensorTypeError, match=r"tensor 'IMAGE' holds FP32, no strings; use .numpy\(\)"):
        view_of(floats()).strings()


@needs_versions
@pytest.mark.parametrize("writable", [True, False])
def test_another_library_learns_whether_it_may_write(writable: bool) -> None:
    assert numpy_takes(view_of(floats(), writable=writable)).flags.writeable is writable


@pytest.mark.parametrize("version", [None, (0, 8)])
def test_a_read_only_view_is_not_given_to_a_consumer_that_could_not_know(version: tuple[int, int] | None) -> None:
    view = view_of(floats(), writable=False)
    with pytest.raises(BufferError, match=r"'IMAGE' is read-only, .* ask for max_version=\(1, 0\), or use .numpy\(\)"):
        view.__dlpack__(max_version=version)


@pytest.mark.parametrize(
    ("wanted", "refusal"),
    [
        *(
            ({"stream": stream}, "'IMAGE' is in CPU memory, which has no stream; pass stream=None")
            for stream in (0, -1)
        ),
        *(({"dl_device": device}, r"'IMAGE' is on device \(1, 0\), asked for was") for device in ((2, 0), (1, 1))),
        ({"copy": True}, "'IMAGE' never copies; copy the array that you make from it"),
    ],
    ids=str,
)
def test_a_view_has_no_stream_does_not_move_and_does_not_copy(wanted: dict[str, Any], refusal: str) -> None:
    with pytest.raises(BufferError, match=refusal):
        view_of(floats()).__dlpack__(**wanted)


@pytest.mark.parametrize("arguments", [{"dl_device": (1, 0)}, {"copy": False}, {"stream": None, "copy": None}])
def test_what_is_so_anyway_may_be_asked_for(arguments: dict[str, Any]) -> None:
    assert "dltensor" in repr(view_of(floats()).__dlpack__(**arguments))


@pytest.mark.parametrize("writable", [True, False])
def test_numpy_makes_an_array_of_the_very_memory(writable: bool) -> None:
    array = floats()
    view = view_of(array, writable=writable)
    for made in (np.asarray(view), np.asarray(view, np.float32), np.array(view, copy=False)):
        assert (made.dtype, made.shape, made.ctypes.data) == (array.dtype, array.shape, array.ctypes.data)
        assert made.flags.writeable is writable
    assert np.add(view, view).tolist() == (2 * array).tolist()


DELIVERED: Any = SimpleNamespace(shape=lambda: [2])
ARRAY_OF: dict[str, tuple[TensorView, str]] = {
    "TensorView": (view_of(floats()), "np.asarray(view), or torch.from_dlpack(view), or another library's"),
    "DeliveredView": (
        DeliveredView("IMAGE", DELIVERED, dtypes.BY_NAME["FP32"], None),  # type: ignore[arg-type]  # not asked
        "np.asarray(view), or torch.from_dlpack(view), or another library's",
    ),
    "StringsView": (
        StringsView("IMAGE", Strings.of("IMAGE", np.array(["a"], object)), "direct"),
        "view.strings() or view.numpy()",
    ),
}


@pytest.mark.parametrize("kind", ARRAY_OF)
@pytest.mark.parametrize(
    "use",
    [lambda view: view * 2, lambda view: 2 - view, lambda view: view[0], list, float, lambda view: view < 1],
    ids=["times", "from a number", "element", "iterated", "as a number", "compared"],
)
def test_a_view_that_is_taken_for_an_array_says_how_to_make_one(kind: str, use: Callable[[Any], Any]) -> None:
    view, ways = ARRAY_OF[kind]
    with pytest.raises(TypeError) as error:
        use(view)
    assert str(error.value) == (
        f"this {kind} is no array to calculate with, or to take elements of; make one of tensor 'IMAGE' first: {ways}"
    )


@pytest.mark.parametrize("kind", ARRAY_OF)
def test_a_view_without_what_arrays_have_says_how_to_make_one(kind: str) -> None:
    view, ways = ARRAY_OF[kind]
    with pytest.raises(AttributeError) as error:
        view.as_numpy()  # type: ignore[attr-defined]
    expected = f"this {kind} has no attribute 'as_numpy'; make an array of tensor 'IMAGE' first: {ways}"
    assert str(error.value) == expected
    assert not hasattr(view, "__cuda_array_interface__")
    with pytest.raises(AttributeError):  # and does not ask itself for ever
        print(TensorView.__new__(TensorView).name)


def test_another_type_without_a_copy_there_is_not() -> None:
    with pytest.raises(ValueError, match="tensor 'IMAGE' is float32, which cannot become int64 without a copy"):
        view_of(floats()).__array__(np.int64, copy=False)


@pytest.mark.parametrize("dtype", [dtypes.BY_NAME["FP32"], dtypes.BF16], ids=["FP32", "BF16"])
def test_where_numpy_makes_no_versioned_capsules_a_consumer_that_knows_them_reads_all_the_same(
    monkeypatch: pytest.MonkeyPatch, dtype: DType
) -> None:
    monkeypatch.setattr(dlpack, "NUMPY_MAKES_VERSIONED", False)
    array = np.ones((2, 3), dtype.numpy)
    taken = dlpack.consume(view_of(array, writable=False).__dlpack__(max_version=(1, 0)))
    assert (taken.dtype, taken.shape, taken.ctypes.data) == (dtype.numpy, (2, 3), array.ctypes.data)
