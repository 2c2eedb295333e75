"""``python -m shm_backend_utils``: the command ``shm-backend-utils``."""

from __future__ import annotations

import sys

from .cli import main

sys.exit(main())
