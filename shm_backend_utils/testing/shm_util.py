"""The old path of :mod:`shm_backend_utils.compat.shm_util`."""

from typing import TYPE_CHECKING

from ..compat.shm_util import __all__
from ..moved import moved

if TYPE_CHECKING:
    from ..compat.shm_util import *  # noqa: F403
else:
    __getattr__ = moved(__name__, dict.fromkeys(__all__, "compat.shm_util"))
