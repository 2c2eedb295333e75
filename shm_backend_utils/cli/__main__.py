"""``python -m shm_backend_utils.cli``."""

from __future__ import annotations

import sys

from . import main

sys.exit(main())
