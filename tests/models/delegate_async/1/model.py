"""Has other models do the work side by side, in the way that the parameter `way` says."""

import asyncio
from pathlib import Path

import numpy as np

from shm_backend_utils.model import Call
from tests.served import Served


class TritonPythonModel(Served):
    def initialize(self, args):
        super().initialize(args)
        self.tasks = set()

    async def execute(self, requests):
        return await self.session.serve_async(requests, self.infer)

    async def infer(self, call: Call) -> None:
        await getattr(self, f"do_{call.parameters['way']}")(call)

    async def do_both(self, call):
        """The first stands at a gate, which is opened only when the second has answered."""
        x = call.input("X")
        first = asyncio.ensure_future(call.forward_async("crash_stages", {"X": x}, parameters=call.parameters))
        second = (await call.forward_async("identity", {"INPUT0": x}))["OUTPUT0"]
        await asyncio.to_thread(Path(call.parameters["go"]).write_bytes, b"")
        call.put("Y", (await first)["Y"].numpy() + second.numpy())

    async def do_leave(self, call):
        """The call is left as soon as the client says so, while the other model is still at work on its memory."""
        x = call.input("X")
        y = call.output("Y", x.shape, np.float32)
        work = call.forward_async("crash_stages", {"X": x}, {"Y": y}, parameters=call.parameters)
        task = asyncio.ensure_future(work)
        self.tasks.add(task)  # or it might be collected; afterwards its result would keep the client's memory mapped
        task.add_done_callback(self.tasks.discard)
        while not Path(call.parameters["leave"]).exists():  # another process makes it
            await asyncio.sleep(0.001)

    async def do_cancel(self, call):
        """As above, but the task is cancelled, which the other model does not notice."""
        await self.do_leave(call)
        (task,) = self.tasks
        task.cancel()
        await asyncio.wait([task])
