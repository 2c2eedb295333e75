"""Install the embedded server for the Python that runs this."""

from __future__ import annotations

import sys

from shm_backend_utils.errors import MachineError
from shm_backend_utils.server import install

if __name__ == "__main__":
    try:
        install()
    except MachineError as error:
        sys.exit(str(error))
