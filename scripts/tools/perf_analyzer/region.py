"""The memory of requests on the direct path: a region that plain tritonclient makes, registers, and looks into."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import tritonclient.grpc as grpcclient
from tritonclient.utils import shared_memory

from shm_backend_utils.cli.common.registered_regions import RegisteredRegion, registered_region

from .cases import Case

__all__ = ["Region", "expected_output", "prepared_region"]

_PAGE: Final = 4096
_NEVER_A_RESULT: Final = 0xFF


def expected_output(client: Any, case: Case) -> npt.NDArray[Any]:
    """Return what the model makes of the case's input when both go in band."""
    tensor = grpcclient.InferInput(case.input_name, list(case.shape), case.type_name)
    tensor.set_data_from_numpy(case.tensor())
    output: npt.NDArray[Any] = client.infer(case.model, [tensor]).as_numpy(case.output_name)
    return output


class Region:
    """The case's input, and behind it room for the output.

    Attributes
    ----------
    descriptor : str
        What a request says about it: in hexadecimal, as perf_analyzer splits a parameter at every colon and turns
        capital letters into small ones.
    """

    def __init__(self, registered: RegisteredRegion, case: Case, expected: npt.NDArray[Any]) -> None:
        self._handle = registered.handle
        self._expected = expected
        self._output_offset = _output_offset(case)
        descriptor = {
            "v": 1,
            "model": case.model,
            "regions": [{"kind": "named", "name": registered.name}],
            "inputs": {case.input_name: [0, 0, case.byte_size, case.type_name, list(case.shape)]},
            "outputs": {case.output_name: [0, self._output_offset, expected.nbytes]},
        }
        self.descriptor = json.dumps(descriptor).encode().hex()

    def clear_output(self) -> None:
        """Put something there that no model writes."""
        nothing = np.full(self._expected.nbytes, _NEVER_A_RESULT, np.uint8)
        shared_memory.set_shared_memory_region(self._handle, [nothing], self._output_offset)

    def has_expected_output(self) -> bool:
        """Return whether the output is there, to the byte."""
        found = shared_memory.get_contents_as_numpy(
            self._handle, np.uint8, [self._expected.nbytes], self._output_offset
        )
        return bool(found.tobytes() == self._expected.tobytes())


@contextmanager
def prepared_region(client: Any, case: Case, expected: npt.NDArray[Any]) -> Iterator[Region]:
    """Make a region with the case's input, and remove it at the end."""
    name = f"perf-analyzer-{os.getpid()}"
    byte_size = _output_offset(case) + expected.nbytes
    with contextlib.ExitStack() as cleanup:
        region = registered_region(cleanup, client, name, byte_size)
        shared_memory.set_shared_memory_region(region.handle, [case.tensor()])
        yield Region(region, case, expected)


def _output_offset(case: Case) -> int:
    return -(-case.byte_size // _PAGE) * _PAGE
