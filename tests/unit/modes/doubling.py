"""What the tests of this folder have a model do."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from shm_backend_utils.dtypes import BY_NAME
from shm_backend_utils.model import ShmSession
from tests.unit.table_client import Client

FP32 = BY_NAME["FP32"]
X = np.arange(4, dtype=np.float32)

Open = Callable[..., ShmSession]
MakeClient = Callable[..., Client]
