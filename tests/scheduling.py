"""Which worker runs which tests."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, Final

from xdist.scheduler import LoadFileScheduling

_WITH_SERVERS: Final = ("gw0", "gw1")
_FIXTURE: Final = "triton_server: "
_FOLDER: Final = "tests/e2e/"  # where nearly all tests use it, most by way of other fixtures


class TwoServers(LoadFileScheduling):  # type: ignore[misc]  # xdist tells no types
    """Each file of tests goes to one worker, and files that use the shared server to the first two workers.

    A server, and the models that many files use, take 10 s of a core to start. Their tests wait much of the time. A
    third worker uses the cores meanwhile. Each takes its own first: of few files, the third would be left with one for
    a server.
    """

    def _assign_work_unit(self, node: Any) -> None:
        has_server = node.gateway.id in _WITH_SERVERS
        fitting = next((file for file in self.workqueue if uses_the_server(file) is has_server), None)
        if fitting is not None:
            self.workqueue.move_to_end(fitting, last=False)
        super()._assign_work_unit(node)

    def _reschedule(self, node: Any) -> None:
        if node.gateway.id not in _WITH_SERVERS and all(map(uses_the_server, self.workqueue)):
            if not node.shutting_down:
                node.shutdown()
        else:
            super()._reschedule(node)


@cache
def uses_the_server(file: str) -> bool:
    return file.startswith(_FOLDER) or _FIXTURE in Path(file).read_text()
