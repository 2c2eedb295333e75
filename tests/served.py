"""What most models of the tests have in common, for their ``model.py`` to inherit: each request is for ``infer``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shm_backend_utils.model import Call, ShmSession


class Served:
    """A model with a session."""

    infer: Callable[[Call], Any]

    def initialize(self, args: dict[str, str]) -> None:
        self.session = ShmSession.from_args(args)

    def execute(self, requests: Any) -> Any:
        return self.session.serve(requests, self.infer)

    def finalize(self) -> None:
        self.session.close()
