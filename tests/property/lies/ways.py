"""The ways by which lies reach a client or a model: each call of one is a lie told, and what came of it checked."""

from __future__ import annotations

import contextlib
import json
import random
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal

import numpy as np
import pytest

from scripts.tools.lone_emulator import LoneServer
from shm_backend_utils.client import PoolOptions, ShmClient, client
from shm_backend_utils.client.errors import InferenceError
from shm_backend_utils.dtypes import BY_NAME
from shm_backend_utils.errors import ModelError, SlotInDoubtError, TensorError
from shm_backend_utils.gpu.instance import InstanceGpus
from shm_backend_utils.gpu.memory.access import CudaAccess
from shm_backend_utils.model.forward.forwarder import Forwarder
from shm_backend_utils.model.forward.ordinary import OtherModel
from shm_backend_utils.model.triton import TritonBackend
from shm_backend_utils.model_spec import ModelSpec
from shm_backend_utils.protocol.parameters import GENERATION_PARAMETER, SLOT_PARAMETER
from shm_backend_utils.tensors.view import TensorView
from shm_backend_utils.testing.emulator import NAME, TensorContent, deliver_response
from shm_backend_utils.testing.emulator.pybind import TritonError
from shm_backend_utils.testing.emulator.request import InferenceRequest
from shm_backend_utils.testing.emulator.response import InferenceResponse

from .liars import (
    CONFIGS,
    ERRORS,
    HINTS,
    SHARE_OF_ERRORS,
    SPEC,
    LyingTransport,
    Said,
    Slots,
    check_array,
    lies,
    random_text,
)

X: Final = np.arange(4, dtype=np.float32).reshape(4, 1)
_AGAIN: Final = 200  # lies until what was prepared is prepared anew
_FRAMES: Final = 50
Path = Literal["direct", "triton-shm", "inline"]


class Way(ABC):
    share = 1.0

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance

    @abstractmethod
    def tell(self) -> str:
        """Tell one lie; return what came of it: ``"right"``, or the error's class. Raise what must not be."""

    @abstractmethod
    def close(self) -> None:
        """Let go of what there is."""


class _OfClient(Way):
    def __init__(self, chance: random.Random, path: Path, protocol: str) -> None:
        super().__init__(chance)
        self._path = path
        self._transport = LyingTransport(protocol, chance)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(client, "connect", lambda *_: self._transport)
            self._client = ShmClient("localhost:1", pool=PoolOptions(region="system", max_bytes=1 << 24))

    @contextlib.contextmanager
    def _lying(self) -> Iterator[None]:
        self._transport.is_lying = True
        try:
            yield
        finally:
            self._transport.is_lying = False
            self._transport.server.orders.clear()

    def _checked(self, result: Mapping[str, Any]) -> str:
        assert self._client._core is not None
        for region, memory in self._client._core.pool.held():
            begin = memory.ctypes.data
            over_records = [name for name, x in result.items() if 0 <= x.ctypes.data - begin < region.data_offset]
            assert not any(result[name].nbytes for name in over_records), over_records
        return checked(result)

    def close(self) -> None:
        self._client.close()
        self._transport.server.close()


class Prepared(_OfClient):
    share = 40.0

    def __init__(self, chance: random.Random, path: Path, protocol: str) -> None:
        super().__init__(chance, path, protocol)
        self._left = 0
        self._call: Any = None

    def tell(self) -> str:
        if self._left == 0:
            self.end_call()
            hints = HINTS if self._path != "inline" else list(HINTS)
            self._call = self._client.prepare("m", {"X": ((4, 1), "float32")}, outputs=hints, path=self._path)
            self._left = _AGAIN
        self._left -= 1
        try:
            with self._lying():
                return self._checked(self._call.infer())
        except SlotInDoubtError:
            self._left = 0
            raise
        except InferenceError:
            self._left = 0  # its memory may be lost, by what the server says
            raise

    def end_call(self) -> None:
        if self._call is not None:
            self._call.close()

    def close(self) -> None:
        self.end_call()
        super().close()


class Whole(_OfClient):
    share = 2.0

    def tell(self) -> str:
        hints = None if self._path == "inline" else HINTS
        self._client.explain("m")
        with self._lying():
            return self._checked(self._client.infer("m", {"X": X}, outputs=hints, path=self._path))


class Stream(_OfClient):
    """Frames of streams, each of which ends with the first lie that is found."""

    share = 4.0

    def __init__(self, chance: random.Random, path: Path, protocol: str) -> None:
        super().__init__(chance, path, protocol)
        self._frames: Any = None
        self._left = 0

    def tell(self) -> str:
        if self._left == 0:
            self._end_stream()
            self._frames = self._client.stream(
                "frames", self._chance.choice(({}, {"X": X})), outputs=HINTS, path=self._path
            )
            self._left = _FRAMES
        self._left -= 1
        try:
            return self._checked(next(self._frames))
        except BaseException:
            self._left = 0
            raise

    def _end_stream(self) -> None:
        if self._frames is not None:
            self._frames.close()

    def close(self) -> None:
        self._end_stream()
        super().close()


def checked(result: Mapping[str, Any]) -> str:
    """Return ``"right"`` for a result that may be; raise AssertionError for another."""
    for name, array in result.items():
        check_array(name, array)
        if array.flags.writeable and array.size and not array.dtype.hasobject:
            array[...] = array
    return "right"


_STOCK: Final = ModelSpec.from_config({**CONFIGS[0], "parameters": {}})
_MOST: Final = 8
_EXPECTED: Final = {
    "but the memory for it is": "does not fit its target",
    "the lengths of its strings": "strings that lead elsewhere",  # found when the first one is read
}


class _Server(LoneServer):
    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        self._chance = chance
        self._slots = Slots()

    def infer(self, request: InferenceRequest) -> InferenceResponse:
        """Lie in the memory that the request names, if it names some, and in the response."""
        named = json.loads(request.parameters())
        if SLOT_PARAMETER in named:
            self._slots.lie(self._chance, named[SLOT_PARAMETER], named[GENERATION_PARAMETER])
        error = None
        if self._chance.random() < SHARE_OF_ERRORS:
            error = TritonError(random_text(self._chance, ERRORS))
        outputs = [_carried(self._chance, said) for said in lies(self._chance)]
        return deliver_response(self.backend, outputs, error)


def _carried(chance: random.Random, said: Said) -> TensorContent:
    datatype = said.datatype if said.datatype in BY_NAME else chance.choice(("FP32", "UINT8", "BYTES"))
    shape = tuple(min(abs(size), _MOST) for size in said.shape[:4])
    array: Any = np.zeros(shape, BY_NAME[datatype].numpy)
    if datatype == "BYTES":
        array[...] = said.content
    return TensorContent(said.name, datatype, shape, array)


class Forwarded(Way):
    """``call.forward`` to a model that maps the memory which a request names."""

    spec = SPEC
    share = 30.0

    def __init__(self, chance: random.Random) -> None:
        super().__init__(chance)
        self._patch = pytest.MonkeyPatch()
        self._patch.setitem(sys.modules, NAME, _Server(chance).backend)
        self._forwarder = Forwarder("caller", TritonBackend(), InstanceGpus(CudaAccess(), 0), "http://localhost:1")
        self._patch.setattr(self._forwarder._specs, "model", lambda *_: OtherModel(self.spec))

    def tell(self) -> str:
        target = TensorView("NUMBERS", np.zeros((4, 1), np.float32), BY_NAME["FP32"], "direct")
        outputs = self._chance.choice((None, HINTS, list(HINTS), {**HINTS, "NUMBERS": target}))
        forwarding = self._forwarder.begin("m", {"X": X}, outputs, {}, "", "", list)
        try:
            for name, view in self._forwarder.execute(forwarding, set()).items():
                check_array(name, view.numpy())
        except (ModelError, TensorError) as error:
            expected = [what for text, what in _EXPECTED.items() if text in str(error)]
            if not expected:
                raise
            return expected[0]
        return "right"

    def close(self) -> None:
        self._forwarder.close()
        self._patch.undo()


class InBand(Forwarded):
    """``call.forward`` to a model that shares no memory."""

    spec = _STOCK
    share = 10.0
