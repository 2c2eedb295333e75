"""Tensors of a user's that a model maps for one request: how long they have to be kept."""

from __future__ import annotations

import os
from collections.abc import Callable

from ...memory import locks
from ...memory.cuda.bank import DeviceBank
from ...memory.descriptors import Descriptor, failures_told
from ...memory.pool.slot import Slot, SlotRegion
from .call import is_answer

__all__ = ["Loan"]


class Loan:
    """Tensors of the user's that are lent for one request.

    Where something breaks off the end of it, the bank keeps the tensors as after a request without an answer.
    """

    _process = 0

    def __init__(self, bank: DeviceBank, region: SlotRegion, slot: Slot, tensors: object) -> None:
        self._bank = bank
        self._slot = slot
        self._generation = slot.generation
        self._record = slot.record_offset
        self._tensors = tensors
        self._own: list[Descriptor] = []  # one, until this is ended
        self._process = os.getpid()
        self._own.append(_duplicate(region.fd))  # the client may be closed before the request is over

    def end_answered(self) -> bool:
        """End it after an answer. Return whether a model still uses the tensors, which are kept then."""
        record = self._record
        is_in_use = locks.has_borrowers(self._own[0].fileno(), record)
        if is_in_use:
            self._keep_while(lambda fd: not locks.is_slot_free(fd, record))
        else:
            self._own.pop().close()
        return is_in_use

    def end_failed(self, error: BaseException) -> None:
        """End it after an error: unless that is the answer, the tensors are kept until the request cannot begin."""
        if is_answer(error):
            self.end_answered()
        else:
            self._end_unanswered()

    def _end_unanswered(self) -> None:
        slot, generation, record = self._slot, self._generation, self._record
        self._keep_while(lambda fd: slot.may_begin(generation) or not locks.is_slot_free(fd, record))

    def _keep_while(self, is_in_use: Callable[[int], bool]) -> None:
        """Have the bank keep the tensors; it has the descriptor then, as there may be no other one."""
        self._bank.keep_while(self._own.pop(), is_in_use, self._tensors)

    def __del__(self) -> None:
        if self._process == os.getpid() and self._own:
            self._end_unanswered()


@failures_told("to lend a tensor takes a file descriptor for the time of the call")
def _duplicate(fd: int) -> Descriptor:
    return Descriptor(os.dup, fd)
