"""Takes strings and gives strings, as plain models do."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        words = pb_utils.get_input_tensor_by_name(request, "WORDS").as_numpy()
        loud = np.array([word.upper() for word in words], np.object_)
        lengths = np.array([len(word) for word in words], np.int32)
        return pb_utils.InferenceResponse([pb_utils.Tensor("LOUD", loud), pb_utils.Tensor("LENGTHS", lengths)])
