"""Checks that work on streams is in order. A gate holds a stream, so nothing here is in order by luck."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from functools import partial
from typing import Final

from shm_backend_utils.client import ShmError
from shm_backend_utils.gpu.arrays.device_array import DeviceArray
from shm_backend_utils.gpu.arrays.imported import imported
from shm_backend_utils.gpu.streams import named_stream
from shm_backend_utils.tensors.dlpack import VERSION

from ..report import raised, require
from .client import COUNT, HELD_S, MORTAL, NUMBERS, Check, ServerClient, wait_until

_TURNS: Final = 2
_SOON_S: Final = 5.0


def _waited_for(client: ServerClient, stream: str) -> None:
    """The work of a model is held: the answer must not leave."""
    gpu = client.gpu
    with client.prepared(hold="call", stream=stream) as call:
        call.infer().release()  # CUDA may wait for all streams before it loads a kernel, so it is loaded now
        for turn in range(_TURNS):
            gpu.upload(gpu.described(call.inputs["INPUT0"]), NUMBERS + turn)
            call.inputs_ready(gpu.stream)
            with client.gate.closed():
                answer = client.others.submit(call.infer)
                client.launched(answer)
                time.sleep(HELD_S)
                require(not answer.done(), "the model has answered, and its work had not begun")
            client.require_quick(answer.result(), NUMBERS + turn, f"the output of turn {turn}")


def _others_are_not(client: ServerClient) -> None:
    """Work of others is held, in the model's process and in the client's: the call must be answered all the same."""
    gpu = client.gpu
    stranger = gpu.kernels.stream(0)
    with client.prepared(hold="stranger") as call:
        gpu.upload(gpu.described(call.inputs["INPUT0"]), NUMBERS)
        call.inputs_ready(gpu.stream)
        call.infer().release()  # who had this memory before may have named no stream, and is waited for now
        call.inputs_ready(gpu.stream)
        with client.gate.closed() as gate:
            gate.hold(gpu.runtime, stranger, 0)
            answer = client.others.submit(call.infer)
            wait_until(answer.done, "the call has named its streams, and waits for another one", _SOON_S)
        client.require_quick(answer.result())


def _answers_early(client: ServerClient) -> None:
    """The work of a model is held: the answer must leave, and the client's stream must wait."""
    gpu = client.gpu
    stream = gpu.kernels.stream(0)
    handle = named_stream(stream).handle
    target = gpu.new(COUNT)
    with client.prepared("early", hold="call") as call:
        call.infer().release()  # as above
        for turn in range(_TURNS):
            gpu.upload(gpu.described(call.inputs["INPUT0"]), NUMBERS + turn)
            with client.gate.closed():
                answer = client.others.submit(call.infer, cuda_stream=stream)
                wait_until(answer.done, "the model has not answered before its work was done", _SOON_S)
                with answer.result() as result:
                    found = imported(gpu.runtime, result["OUTPUT0"], handle)
                    with gpu.runtime.on(0):
                        gpu.runtime.copy(target.address, found.address, COUNT * 4, handle)
                time.sleep(HELD_S)
                require(not gpu.is_idle(handle), "the client's stream did not wait for the model's")
            gpu.runtime.synchronize_stream(handle, 0)
            client.require_values(target, gpu.kernels.after_quick(NUMBERS + turn), f"the output of turn {turn}")


def _inputs_are_waited_for(client: ServerClient, *, is_named: bool) -> None:
    """The stream that writes an input is held: the call must not read it."""
    gpu = client.gpu
    stream = gpu.kernels.stream(0)
    source, tensor = client.filled(), client.filled(-NUMBERS)
    x, y = gpu.described(source), gpu.described(tensor)
    gpu.kernels.quick(y, gpu.new(COUNT), stream)  # it is loaded now, as above
    gpu.settle()
    named = {"cuda_stream": stream} if is_named else {}
    with client.gate.closed() as gate:
        gate.hold(gpu.runtime, stream, 0)
        gpu.kernels.quick(x, y, stream)
        answer = client.others.submit(client.infer, tensor, **named)
        time.sleep(HELD_S)
        require(not answer.done(), "the call was answered, and its input had not been written")
    client.require_quick(answer.result(), gpu.kernels.after_quick(NUMBERS))


def _dlpack(client: ServerClient) -> None:
    """The stream that writes an array is held: its consumer by DLPack must wait."""
    gpu = client.gpu
    runtime, x, y, target = gpu.runtime, client.array(NUMBERS), client.array(-NUMBERS), gpu.new(COUNT)
    first, second = (named_stream(gpu.kernels.stream(0)).handle for _ in range(2))
    with client.gate.closed() as gate:
        gate.hold(runtime, first, 0)
        with runtime.on(0):
            runtime.copy(y.address, x.address, x.nbytes, first)
            written = DeviceArray(runtime, y.address, y.shape, y.dtype, 0, y, written_on=first)
            consumed = imported(runtime, written.__dlpack__(stream=second, max_version=VERSION), second)
            runtime.copy(target.address, consumed.address, x.nbytes, second)
        time.sleep(HELD_S)
        require(not gpu.is_idle(second), "the consumer's stream did not wait for the producer's")
    require(consumed.address == y.address, "the consumer got a copy")
    client.require_values(target, NUMBERS, "what the consumer has read")


def model_is_killed(client: ServerClient) -> str:
    """A model has answered, and dies before its work begins: nothing of the client's may wait for it."""
    gpu = client.gpu
    handle, dropped = gpu.runtime.create_stream(0), [gpu.new(COUNT)]
    with client.prepared(MORTAL, hold="call") as call:
        call.infer().release()
        gpu.upload(gpu.described(call.inputs["INPUT0"]), NUMBERS)
        with client.gate.closed():
            answer = client.others.submit(call.infer, cuda_stream=handle)
            model = client.launched(answer)
            wait_until(answer.done, "the model has not answered before its work was done", _SOON_S)
            result = answer.result()
            dropped.clear()  # a thread frees it, and CUDA waits there for the stream that waits for the model
            time.sleep(HELD_S)
            require(not gpu.is_idle(handle), "the client's stream does not wait for the model's")
            os.kill(model, signal.SIGKILL)
            otherwise = "the client's stream has not gone on after the model's death"
            seconds = wait_until(lambda: gpu.is_idle(handle), otherwise, patience_s=1.0)
        raised(ShmError, "the memory that the model has left is used again", call.infer, cuda_stream=handle)
        result.release()
    client.require_quick(client.infer(client.filled()))
    return f"its stream went on after {seconds:.3f} s"


CHECKS: Final[Mapping[str, Check]] = {
    "a stream that the model has named is waited for": partial(_waited_for, stream="named"),
    "without a name in the model the whole GPU is waited for": partial(_waited_for, stream="unnamed"),
    "a call that has named its streams waits for no other": _others_are_not,
    "a stream that the client has named is waited for": partial(_inputs_are_waited_for, is_named=True),
    "without a name in the client all streams are waited for": partial(_inputs_are_waited_for, is_named=False),
    "with SHM_GPU_EVENTS the answer leaves before the work, and the client's stream waits": _answers_early,
    "DLPack hands memory from stream to stream in order": _dlpack,
}
