"""A model that lies to the one that calls it: in its response, and in the memory that it is lent."""

from __future__ import annotations

import json
import random
import sys
from typing import Any, Final

import numpy as np
import pytest

from scripts.tools.lone_emulator import LoneServer
from shm_backend_utils.dtypes import BY_NAME
from shm_backend_utils.errors import ModelError, TensorError
from shm_backend_utils.gpu.memory.access import CudaAccess
from shm_backend_utils.gpu.model import DeviceArrays
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

from .liars import ERRORS, SHARE_OF_ERRORS, Slots
from .said import CONFIGS, HINTS, SPEC, Said, check_array, lies, random_text
from .ways import Way, X

__all__ = ["Forwarded", "InBand"]

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
        self._forwarder = Forwarder("caller", TritonBackend(), DeviceArrays(CudaAccess(), 0), "http://localhost:1")
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
