"""Install the embedded server for the Python that runs this, and the NumPy that its models need. No packages needed."""

from __future__ import annotations

import sys

from shm_backend_utils.errors import MachineError
from shm_backend_utils.server import install
from shm_backend_utils.server.install import install_numpy, needs_numpy_1

if __name__ == "__main__":
    try:
        installation = install()
        if needs_numpy_1(installation):
            install_numpy(installation.numpy)
    except MachineError as error:
        sys.exit(str(error))
