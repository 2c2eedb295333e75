import json
import sys
import time

import numpy as np

from shm_backend_utils.model import Call, ShmSession


class TritonPythonModel:
    def initialize(self, args):
        self.session = ShmSession.from_args(args)
        inputs = json.loads(args["model_config"])["input"]
        self.names = [(tensor["name"], tensor["name"].replace("X", "Y")) for tensor in inputs]
        self.times_ns = []
        self.counts_functions = False
        self.functions = {}

    def execute(self, requests):
        if "Y0" not in requests[0].requested_output_names():
            return self.session.serve(requests, self.tell)
        if self.counts_functions:
            return self.execute_counted(requests)
        begin = time.perf_counter_ns()
        responses = self.session.serve(requests, self.infer)
        self.times_ns.append(time.perf_counter_ns() - begin)
        return responses

    def execute_counted(self, requests):
        self.counts_functions, self.functions = False, {}
        sys.setprofile(self.note)
        try:
            return self.session.serve(requests, self.infer)
        finally:
            sys.setprofile(None)

    def note(self, frame, event, argument):
        if event == "call":
            self.functions[frame.f_code] = None

    def infer(self, call: Call) -> None:
        for source, target in self.names:
            x = call.input(source)
            y = call.output(target, x.shape, x.dtype)
            np.copyto(y.numpy(), x.numpy())

    def tell(self, call: Call) -> None:
        if call.requested("TIMES_NS"):
            told, self.times_ns = self.times_ns, []
            call.put("TIMES_NS", np.array(told, np.int64))
        else:
            lines = [f"{code.co_filename}\t{getattr(code, 'co_qualname', code.co_name)}" for code in self.functions]
            call.put("FUNCTIONS", lines)
            self.counts_functions = bool(call.parameters.get("count_in_next"))

    def finalize(self):
        self.session.close()
