from collections.abc import Iterator
from typing import Any

import numpy as np

from shm_backend_utils.model import ShmSession, StreamCall

SIZE = 256


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self.session = ShmSession.from_args(args)

    def execute(self, requests: list[Any]) -> None:
        self.session.serve_streams(requests, self.answer)  # a decoupled model's execute returns nothing

    def answer(self, call: StreamCall) -> Iterator[None]:
        image = call.input("IMAGE").numpy()
        height, width, _ = image.shape
        for top in range(0, height, SIZE):
            for left in range(0, width, SIZE):
                tile = image[top : top + SIZE, left : left + SIZE]
                call.output("TILE", tile.shape, tile.dtype).numpy()[:] = tile
                call.put("PLACE", np.array([top, left], np.int32))
                yield  # sends what was written; if the client does not want more, the generator is closed here

    def finalize(self) -> None:
        self.session.close()
