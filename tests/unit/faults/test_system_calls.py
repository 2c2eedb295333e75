"""System calls that fail, and go well again afterwards."""

from __future__ import annotations

import errno
import os

import pytest

from shm_backend_utils.testing.faults.system_calls import CALLS, Failing, Fault


@pytest.mark.parametrize("call", CALLS)
def test_faults_that_were_made_before_either_happens_leave_nothing_behind(call: str) -> None:
    module, name = CALLS[call]
    real = getattr(module, name)
    outer, inner = (Failing(Fault(call, 0, errno.EIO)) for _ in range(2))
    with outer:
        failing = getattr(module, name)
        with inner:
            assert getattr(module, name) is not failing
        assert getattr(module, name) is failing
    assert getattr(module, name) is real


def test_both_of_two_faults_happen() -> None:
    first, second = Failing(Fault("fstat", 0, errno.EIO)), Failing(Fault("fstat", 0, errno.EPERM))
    with first, second:
        for error in (errno.EPERM, errno.EIO, errno.EBADF):
            with pytest.raises(OSError, match=os.strerror(error)):
                os.fstat(-1)
    assert first.has_happened
    assert second.has_happened
