"""A decoupled model that does what the parameter `do` says, right or wrong."""

import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        for request in requests:
            do = json.loads(request.parameters() or "{}").get("do", "")
            sender = request.get_response_sender()
            y = pb_utils.InferenceResponse([pb_utils.Tensor("Y", request.inputs()[0].as_numpy())])
            if do == "raise":
                raise ValueError("broken")
            if do == "one, then raise":
                sender.send(y)
                raise ValueError("broken")
            if do == "return":
                return [y]
            if do == "error":
                sender.send(pb_utils.InferenceResponse([], pb_utils.TritonError("e1")))
            elif do == "unknown":
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("Z", np.zeros(1, np.float32))]))
            elif do != "nothing":
                sender.send(y)
                sender.send(y)
            sender.send(flags=final)
        return None
