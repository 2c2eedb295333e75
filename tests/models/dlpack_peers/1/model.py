"""Turns every input upside down, and for that exchanges tensors with another library by DLPack.

The parameter `peer` names the library, `way` what it does. What must be so is asserted here, and fails the request.
"""

import numpy as np
import triton_python_backend_utils as pb_utils

from shm_backend_utils.model import Call
from shm_backend_utils.tensors import dlpack
from tests.served import Served

VERSIONED = np.lib.NumpyVersion(np.__version__) >= "2.1.0"


class Producer:
    """Has DLPack's two methods, and nothing else."""

    def __init__(self, array):
        self.array = array

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, **wanted):
        return self.array.__dlpack__(**wanted)


class NumpyPeer:
    """NumPy, which learns from versioned capsules what it may write to, and does not know BF16."""

    learns_what_is_read_only = VERSIONED

    def take(self, producer):
        return np.from_dlpack(producer)

    def array(self, taken):
        return taken

    def give(self, array):
        return Producer(array)


class TorchPeer:
    """PyTorch, which asks for versioned capsules, and also takes others."""

    learns_what_is_read_only = VERSIONED

    def __init__(self):
        import torch

        self.take = torch.from_dlpack

    def array(self, taken):
        return dlpack.consume(taken.__dlpack__())

    def give(self, array):
        return self.take(dlpack.export(array))


class BackendPeer:
    """Triton's Python backend, which takes unversioned capsules of contiguous tensors."""

    learns_what_is_read_only = False

    def take(self, producer):
        return self.tensor(producer.__dlpack__())

    def array(self, taken):
        return dlpack.consume(taken.to_dlpack())

    def give(self, array):
        return self.tensor(dlpack.export(array))

    def tensor(self, capsule):
        tensor = pb_utils.Tensor.from_dlpack("T", capsule)
        dlpack.mark_used(capsule)
        return tensor


PEERS = {"numpy": NumpyPeer, "torch": TorchPeer, "pb_utils": BackendPeer}


class TritonPythonModel(Served):
    def infer(self, call: Call) -> None:
        peer, way = PEERS[call.parameters["peer"]](), getattr(self, call.parameters["way"].replace(" ", "_"))
        for view in call.inputs.values():
            try:
                way(call, peer, view, view.name.replace("IN_", "OUT_"))
            except Exception as error:
                raise RuntimeError(f"{view.name}: {type(error).__name__}: {error}") from error

    def takes_an_input(self, call, peer, view, name):
        upside_down = np.flip(view.numpy(), 0)
        if peer.learns_what_is_read_only:
            taken = peer.array(peer.take(view))
            assert_same(taken, view.numpy())
            call.put(name, np.flip(taken, 0))
        else:
            assert is_refused(peer, view), "a read-only tensor was given to somebody who cannot know that it is"
            call.put(name, upside_down)

    def takes_an_output(self, call, peer, view, name):
        output = call.output(name, view.shape, view.dtype)
        self.fill(output, peer.array(peer.take(output)), view)

    def takes_an_unversioned_capsule(self, call, peer, view, name):
        output = call.output(name, view.shape, view.dtype)
        self.fill(output, peer.array(peer.take(output.__dlpack__())), view)

    def fill(self, output, taken, view):
        assert_same(taken, output.numpy())
        if not taken.flags.writeable:
            assert not VERSIONED, "who was not told may write"
            taken = output.numpy()  # NumPy before 2.1 writes to nothing that it has taken
        taken[...] = np.flip(view.numpy(), 0)

    def gives_a_tensor(self, call, peer, view, name):
        call.put(name, peer.give(np.flip(view.numpy(), 0).copy()))

    def gives_a_transposed_tensor(self, call, peer, view, name):
        call.put(name, peer.give(np.flip(view.numpy(), 0).copy("F")))

    def gives_every_other_row(self, call, peer, view, name):
        call.put(name, peer.give(np.repeat(np.flip(view.numpy(), 0), 2, axis=0)[::2]))

    def gives_an_output_back(self, call, peer, view, name):
        upside_down = call.output(name, view.shape, view.dtype)
        upside_down.numpy()[...] = np.flip(view.numpy(), 0)
        call.put(name, peer.take(upside_down))


def assert_same(taken, array):
    assert (taken.dtype, taken.shape) == (array.dtype, array.shape)
    assert taken.size == 0 or taken.ctypes.data == array.ctypes.data, "it was copied"
    assert taken.tobytes() == array.tobytes()


def is_refused(peer, view):
    try:
        peer.take(view)
    except BufferError:
        return True
    return False
