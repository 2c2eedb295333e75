"""Faults for hypothesis to choose."""

from __future__ import annotations

import errno

from hypothesis import strategies as st

from shm_backend_utils.testing.faults.system_calls import CALLS, INTERRUPT, Fault

ERRORS = (errno.ENOSPC, errno.ENOMEM, errno.EMFILE, errno.EINTR, errno.EACCES, errno.ENOLCK, INTERRUPT)
BUSY = ("fcntl", errno.EACCES)  # no failure: somebody has the lock
# A name that cannot be removed stays for the reaper, until this process has ended: the machine would count it as lost.
STAYS = [("unlink", error) for error in ERRORS if error != INTERRUPT]
faults = st.builds(Fault, st.sampled_from(sorted(CALLS)), st.integers(0, 4), st.sampled_from(ERRORS)).filter(
    lambda fault: (fault.call, fault.error) not in (BUSY, *STAYS)
)
