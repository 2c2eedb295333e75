"""Which worker runs which tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from xdist.scheduler import LoadFileScheduling

__all__ = ["OneSharedServer"]

_FIXTURE: Final = "triton_server"
_FOLDER: Final = "tests/e2e/"  # where nearly all tests use it, most by way of other fixtures


class OneSharedServer(LoadFileScheduling):  # type: ignore[misc]  # xdist tells no types
    """Each file of tests goes to one worker, and all files that use the shared server to the same one.

    To start and stop a server with all models takes a core a minute, and to run it takes a gigabyte or two. One worker
    is well employed with these tests, and the other one with all the rest.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._scopes: dict[str, str] = {}

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        if file not in self._scopes:
            uses_it = file.startswith(_FOLDER) or f"{_FIXTURE}: " in Path(file).read_text()
            self._scopes[file] = _FIXTURE if uses_it else file
        return self._scopes[file]
