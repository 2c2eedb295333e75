"""Install the embedded server for the Python that runs this, and the NumPy that its models need. No packages needed."""

from __future__ import annotations

import sys

from shm_backend_utils.errors import MachineError
from shm_backend_utils.server import install
from shm_backend_utils.server.install import install_numpy, wants_another

if __name__ == "__main__":
    try:
        installation = install()
        if wants_another(installation):
            install_numpy(installation.numpy)
    except MachineError as error:
        sys.exit(str(error))
