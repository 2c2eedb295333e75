import sys

import multiply  # the sample model's code

from shm_backend_utils.model import Call


class TritonPythonModel(multiply.TritonPythonModel):
    def execute(self, requests):
        if "FUNCTIONS" in requests[0].requested_output_names():
            return self.session.serve(requests, self.tell)
        self.functions = {}
        sys.setprofile(self.note)
        try:
            return super().execute(requests)
        finally:
            sys.setprofile(None)

    def note(self, frame, event, argument):
        if event == "call":
            self.functions[frame.f_code] = None

    def tell(self, call: Call) -> None:
        lines = [f"{code.co_filename}\t{getattr(code, 'co_qualname', code.co_name)}" for code in self.functions]
        call.put("FUNCTIONS", [lines])
