"""What can be wrong between this process and a model that is loaded: what a probe of it tells."""

from __future__ import annotations

from typing import Final

from ..findings import Trouble

_LOAD_AGAIN: Final = (
    "Load the model again, or restart the server; the server's log, or the kernel's, says what killed it."
)

FORWARD_FAILS: Final = Trouble(
    "forward-fails",
    "The model's calls of other models (call.forward) keep failing, as there is no shared memory for them.",
    "Mend what the finding names: room in /dev/shm, its mode, or who removes files there (systemd: RemoveIPC=no).",
)
LIFE_UNKNOWN: Final = Trouble(
    "life-unknown",
    "Nobody can tell from here whether the model's process lives: this Triton calls dead models ready, too.",
    "Run the doctor on the server's machine, in its container and as its user.",
    is_fatal=False,
)
DEAD_INSTANCE: Final = Trouble(
    "dead-instance",
    "Some of the model's processes are dead, though the server calls the model ready: requests that they get fail.",
    _LOAD_AGAIN,
)
DEAD_STUB: Final = Trouble(
    "dead-stub",
    "The model's process is dead, though the server calls the model ready: every request fails.",
    _LOAD_AGAIN,
)
NO_SESSION: Final = Trouble(
    "no-session",
    "The model declares the direct path, and no session answers: its code uses none, or execute fails before that.",
    "Serve requests by ShmSession in model.py, and mend what execute raises; or remove SHM_PATHS and the input SHM "
    "from config.pbtxt.",
)
MODEL_BUSY: Final = Trouble(
    "model-busy",
    "The model did not answer in time: it is busy, or it hangs, or has no slot for one more sequence.",
    "Ask again when it has less to do; make sure that execute returns what session.serve returns; if it hangs, load it "
    "again.",
)
NEEDS_GRPC: Final = Trouble(
    "needs-grpc",
    "The model is decoupled, and over HTTP there are no streams.",
    "Use a gRPC URL for it.",
    is_fatal=False,
)
OTHER_PROTOCOL: Final = Trouble(
    "other-protocol",
    "Model and client speak different versions of the protocol, so the direct path is closed.",
    "Install the same release of triton-shm-backend-utils on both sides.",
)
OTHER_VERSION: Final = Trouble(
    "other-version",
    "The model's library is of another version than this one; they speak one protocol.",
    "Install the same release on both sides when it suits.",
    is_fatal=False,
)
OTHER_USER: Final = Trouble(
    "other-user",
    "The model may not open this user's memory: it belongs to another user, or its mode keeps the server out.",
    "Name the server's user and this one, both, in the model's parameter SHM_ALLOWED_UIDS, as `1000,1001`, and let the "
    "server's user in by PoolOptions(access=Access(0o660, GROUP_ID)); or run both as one user.",
)
OTHER_NAMESPACE: Final = Trouble(
    "other-namespace",
    "The server is on this machine, and shares neither the network namespace nor /dev/shm with this process.",
    "Share one of them: containers of one pod share the network (docker: --network=container:NAME); or --ipc=host, "
    "--ipc=container:NAME or one volume at /dev/shm on both sides.",
)
NO_SEALED_MEMORY: Final = Trouble(
    "no-sealed-memory",
    "The model cannot fetch sealed memory, so clients take that in /dev/shm, which has a size and keeps what is left.",
    "Run client and server in one network namespace: docker --network=container:NAME, containers of one pod.",
    is_fatal=False,
)
REFUSED: Final = Trouble(
    "refused",
    "The model refuses memory of this process.",
    "Do what the refusal says.",
)
WRONG_REPORT: Final = Trouble(
    "wrong-report",
    "The model has answered the probe, and what lies in the client's memory is not its answer.",
    "Install the same release on both sides; if it stays so, report it with the output of --json.",
)
NUMPY_2_STRINGS: Final = Trouble(
    "numpy-2-strings",
    "The model has strings and NumPy 2, and Triton's stub was built for NumPy 1: strings in band end its process.",
    "Install numpy<2 for the model, or use a newer Triton; strings on the direct path are not affected.",
)
OLD_STUB: Final = Trouble(
    "numpy-2-old-stub",
    "The model has NumPy 2, and Triton's stub was built for NumPy 1: as_numpy() and Tensor() lose contents silently.",
    "Use the session's calls alone for tensors in model.py, or install numpy<2 for the model, or use a newer Triton.",
    is_fatal=False,
)
NAMES_UNUSABLE: Final = Trouble(
    "names-unusable",
    "The model does not know where its server answers over HTTP, so registered names mean nothing to it.",
    "Set the parameter SHM_SERVER_URL in config.pbtxt, if clients name registered regions.",
    is_fatal=False,
)
DRIVER_NOT_SEEN: Final = Trouble(
    "driver-not-seen",
    "One side has a GPU, and the other one sees no driver or no GPU: tensors on GPUs cannot be shared.",
    "Start the container with --gpus, and install cuda-bindings on both sides; see nvidia-smi there.",
)
GPU_NOT_SEEN: Final = Trouble(
    "gpu-not-seen",
    "Client and model see different GPUs, so tensors on those that only one sees cannot be shared.",
    "Give both the same GPUs, by UUID: CUDA_VISIBLE_DEVICES, or docker --gpus device=UUID.",
)
MIG: Final = Trouble(
    "mig",
    "Client and model have different instances of a GPU (MIG), between which CUDA shares no memory.",
    "Give both the same instance, by its UUID: CUDA_VISIBLE_DEVICES=MIG-UUID.",
)
PID_NAMESPACE: Final = Trouble(
    "pid-namespace",
    "Client and model have GPUs and different PID namespaces; CUDA takes a handle of a process with its own number for "
    "one of its own.",
    "Share process ids: docker --pid=container:NAME, Kubernetes shareProcessNamespace: true.",
    is_fatal=False,
)
