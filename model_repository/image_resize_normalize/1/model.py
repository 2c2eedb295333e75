from typing import Any

import cv2
import numpy as np

from shm_backend_utils.model import Call, ShmSession

SIZE = 224
MEAN = np.array([0.485, 0.456, 0.406], np.float32)  # of ImageNet, per RGB channel, in units of 255
STD = np.array([0.229, 0.224, 0.225], np.float32)
SCALE = 1 / (255 * STD)
SHIFT = -MEAN / STD


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self.session = ShmSession.from_args(args)

    def execute(self, requests: list[Any]) -> list[Any]:
        return self.session.serve(requests, self.infer)

    def infer(self, call: Call) -> None:
        image = call.input("IMAGE").numpy()
        normalized = call.output("NORMALIZED", (3, SIZE, SIZE), np.float32).numpy()
        shrinks = min(image.shape[:2]) >= SIZE
        resized = cv2.resize(image, (SIZE, SIZE), interpolation=cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR)
        for channel in range(3):  # HWC to CHW, straight into the output
            np.multiply(resized[:, :, channel], SCALE[channel], out=normalized[channel])
            normalized[channel] += SHIFT[channel]

    def finalize(self) -> None:
        self.session.close()
