"""Answers with as many responses as the parameter `count` says, else for ever; response i is the input plus i.

The parameter `way` says how; see the methods.
"""

import itertools
import time

import numpy as np

from shm_backend_utils.model import ShmSession

PATIENCE_S = 30


class TritonPythonModel:
    def initialize(self, args):
        self.session = ShmSession.from_args(args)
        self.begun = self.ended = 0

    def execute(self, requests):
        self.session.serve_streams(requests, self.answer)

    def answer(self, call):
        return getattr(self, f"do_{call.parameters.get('way', 'count')}")(call)

    def finalize(self):
        self.session.close()

    def do_count(self, call):
        x = call.input("X").numpy()
        self.begun += 1
        try:
            for i in steps(call):
                np.add(x, np.float32(i), out=call.output("Y", x.shape, x.dtype).numpy())
                yield
        finally:
            self.ended += 1

    def do_ask(self, call):
        """One response, without a generator: how many generators began, and how many have ended."""
        call.put("BEGUN_AND_ENDED", np.array([self.begun, self.ended], np.int64))
        call.send()

    def do_nothing(self, call):
        """No response at all."""

    def do_grow(self, call):
        """Response i is as long as i + 1 inputs."""
        x = call.input("X").numpy()
        for i in steps(call):
            call.put("Y", np.tile(x + np.float32(i), i + 1))
            yield

    def do_fail(self, call):
        """An error after `count` responses."""
        yield from self.do_count(call)
        raise RuntimeError("the model gave up half way")

    def do_stall(self, call):
        """After `count` responses nothing, until the client has gone."""
        yield from self.do_count(call)
        deadline = time.monotonic() + PATIENCE_S
        while not call.cancelled and time.monotonic() < deadline:
            time.sleep(0.001)

    def do_say(self, call):
        """Words."""
        for i in steps(call):
            call.put("WORDS", np.array([f"größer als {i}", "x" * i], object))
            yield


def steps(call):
    count = call.parameters.get("count")
    for i in itertools.count() if count is None else range(count):
        yield i
        if count is None:
            time.sleep(0.001)  # Triton 2.51 may crash of a client that leaves just when a response is sent to it
