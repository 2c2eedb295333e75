"""Regions on a GPU that begin somewhere in an allocation, as torch's tensors do, in ``attach``."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from tritonclient import grpc, http

from shm_backend_utils.compat.attach import CudaRegion, attach
from shm_backend_utils.errors import CallerError, TableError
from shm_backend_utils.memory.cuda.access import CudaAccess
from shm_backend_utils.protocol.claims import CudaRegionClaim
from shm_backend_utils.protocol.named import PARAMETER, parse_descriptor
from shm_backend_utils.protocol.spans import Table

HANDLE = bytes(range(64))
UUID = "ab" * 16


class Runtime:
    def device_uuid(self, device: int) -> str:
        return UUID


def attached(protocol: Any, region: CudaRegion, offset: int = 0, byte_size: int = 16) -> Table:
    x = protocol.InferInput("X", [byte_size // 4], "FP32")
    x.set_shared_memory("frames", byte_size, offset)
    y = protocol.InferRequestedOutput("Y")
    y.set_shared_memory("frames", byte_size, offset + byte_size)
    access: Any = CudaAccess(Runtime)  # type: ignore[arg-type]  # of CUDA, only that is asked
    access._mappings = type("Mappings", (), {"runtime": Runtime()})()
    made = attach("m", [x], [y], cuda_regions={"frames": region}, cuda=access)
    _, table = parse_descriptor(made["parameters"][PARAMETER])
    return table


@pytest.mark.parametrize("protocol", [grpc, http], ids=["grpc", "http"])
@pytest.mark.parametrize("begin", [0, 512])
@pytest.mark.parametrize("offset", [0, 256])
def test_offsets_count_from_where_the_handle_opens(protocol: Any, begin: int, offset: int) -> None:
    table = attached(protocol, CudaRegion(base64.b64encode(HANDLE), 0, 1024, begin), offset)
    assert table.regions == (CudaRegionClaim(HANDLE, begin + 1024, UUID, None),)
    assert table.inputs["X"].offset == begin + offset
    assert table.outputs["Y"].offset == begin + offset + 16


def test_a_region_is_not_left_behind_its_end() -> None:
    with pytest.raises(TableError):
        attached(grpc, CudaRegion(base64.b64encode(HANDLE), 0, 1024, 512), offset=1024)


@pytest.mark.parametrize(("byte_size", "offset"), [(1024, -1), (0, 0), (-1, 4)])
def test_a_region_that_cannot_be_is_refused(byte_size: int, offset: int) -> None:
    with pytest.raises(CallerError, match=r"CUDA region 'frames' begins at byte .*; expected"):
        attached(grpc, CudaRegion(base64.b64encode(HANDLE), 0, byte_size, offset))


def test_a_region_shows_no_handle() -> None:
    region = CudaRegion(base64.b64encode(HANDLE), 0, 1024, 512)
    assert repr(region) == "CudaRegion(device_id=0, byte_size=1024, offset=512)"
    assert repr(region._replace(offset=0)) == "CudaRegion(device_id=0, byte_size=1024)"
