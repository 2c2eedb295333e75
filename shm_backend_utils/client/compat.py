"""The old path of :mod:`shm_backend_utils.compat.triton_shm_client`."""

from typing import TYPE_CHECKING

from ..compat.triton_shm_client import __all__
from ..moved import moved

if TYPE_CHECKING:
    from ..compat.triton_shm_client import *  # noqa: F403
else:
    __getattr__ = moved(__name__, dict.fromkeys(__all__, "compat.triton_shm_client"))
