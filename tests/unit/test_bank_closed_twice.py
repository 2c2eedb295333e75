"""A bank that is closed while models use its memory, and once more: one thread waits for them, and ends."""

from __future__ import annotations

import os
import threading

from tests.unit.fake_gpu_events import PATIENCE_S

from shm_backend_utils.memory.cuda.bank import DeviceBank
from shm_backend_utils.memory.cuda.memory import CudaAccess
from shm_backend_utils.memory.locks import use
from shm_backend_utils.memory.pool.slot import SlotRegion
from shm_backend_utils.memory.segment import PRIVATE
from shm_backend_utils.protocol.layout import PAGE_SIZE
from tests.unit.fake_gpu import runtime_that_gives_all_back


def collectors() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "shm device memory"]


def test_one_thread_waits_for_models_however_often_the_bank_is_closed() -> None:
    with runtime_that_gives_all_back() as cuda:
        bank = DeviceBank(CudaAccess(lambda: cuda), None)
        region = SlotRegion(100, 1, PAGE_SIZE, PRIVATE)
        bank.provide(region, [0], [4096])
        fd = os.open(f"/dev/shm/{region.key}", os.O_RDWR)
        model = use(fd)
        region.destroy()
        bank.close()
        bank.close()
        (collector,) = collectors()
        model.give_back()
        os.close(fd)
        collector.join(PATIENCE_S)
        assert not collectors()
