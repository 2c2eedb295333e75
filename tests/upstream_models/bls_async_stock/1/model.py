"""As bls_sync_stock, with two requests side by side: the sum of one, the difference of the other."""

import asyncio

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    async def execute(self, requests):
        return [await self.answer(request) for request in requests]

    async def answer(self, request):
        name = pb_utils.get_input_tensor_by_name(request, "MODEL_NAME").as_numpy()[0].decode()
        inputs = [pb_utils.get_input_tensor_by_name(request, each) for each in ("INPUT0", "INPUT1")]
        waited = [
            pb_utils.InferenceRequest(model_name=name, requested_output_names=[output], inputs=inputs).async_exec()
            for output in ("OUTPUT0", "OUTPUT1")
        ]
        responses = await asyncio.gather(*waited)
        for response in responses:
            if response.has_error():
                raise pb_utils.TritonModelException(response.error().message())
        return pb_utils.InferenceResponse([response.output_tensors()[0] for response in responses])
