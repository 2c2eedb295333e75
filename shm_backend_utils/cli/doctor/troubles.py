"""All troubles that the doctor knows: each has a code and one remedy.

The page ``docs/troubleshooting.md`` has a row for each.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

from ...memory.machine import MORE_MEMORY
from ...model.config import PREFIX
from ...model_spec import CARRIER_LINE, PATHS, PATHS_LINE, PATHS_PARAMETER
from ...repository.files import CONFIG_FILE

__all__ = ["Trouble"]

_ADVICE: Final = False  # the exit status stays 0
_LOAD_AGAIN: Final = (
    "Load the model again, or restart the server; the cause of death is in the server's log, or the kernel's."
)
_MORE_ROOM: Final = "docker: --shm-size; Kubernetes: an emptyDir of medium Memory mounted at /dev/shm"


class Trouble(Enum):
    """A fault that happens in practice, in one sentence, and its remedy.

    If it is fatal, requests fail, or are slower than necessary; otherwise it is a piece of advice.
    """

    # The server, the way to it, and the state of its models

    BAD_URL = (
        "The URL does not name a server.",
        "Write HOST:PORT or grpc://HOST:PORT for gRPC, http://HOST:PORT for HTTP, grpcs:// or https:// with TLS.",
    )
    UNKNOWN_HOST = (
        "This machine cannot resolve the host name in the URL.",
        "Correct the name, or make it resolvable; in a pod, use localhost, and with Compose, the service's name.",
    )
    SERVER_NOT_REACHABLE = (
        "No program answers at the address, so every request fails.",
        "Start the server, or correct the address: by default Triton's gRPC is on 8001 and its HTTP on 8000. If it "
        "runs in a container, publish the port.",
    )
    NO_ANSWER = (
        "A program accepts connections at the address, but does not answer.",
        "Check whether the server hangs (its log, its load), and restart it; if it speaks TLS, write grpcs:// or "
        "https://.",
    )
    WRONG_PORT = (
        "The program at the address speaks another protocol than the URL says.",
        "Use grpc:// with Triton's gRPC port, by default 8001, and http:// with its HTTP port, by default 8000.",
    )
    TLS = (
        "Only one side speaks TLS, or the server's certificate is not trusted here.",
        "Write grpcs:// or https:// only if the server speaks TLS; add its certificate to SSL_CERT_FILE or the "
        "system's store.",
    )
    NOT_TRITON = (
        "The program at the address is not Triton.",
        "Correct host and port: by default Triton's HTTP is on 8000 and its gRPC on 8001; port 8002 serves "
        "only metrics.",
    )
    SERVER_NOT_READY = (
        "The server answers, but is not ready: it is still loading models, a model has failed to load, or a model's "
        "process is dead.",
        "Wait until the models are loaded, or fix those that are named below; load a model again if its process is "
        "dead.",
    )
    NO_INDEX = (
        "The server does not list its models, so none was examined.",
        "Name one model with --model, or let the proxy in front of the server pass requests for the repository index.",
    )
    NO_MODELS = (
        "The server has loaded no model, so it cannot serve a request.",
        "Add a model to the server's repository, and load it.",
    )
    NO_OWN_REGION = (
        "This process cannot create a region in /dev/shm: the path triton-shm is closed, and it needs sealed memory.",
        "Follow the finding about /dev/shm; if you see none, the system's error names the cause.",
        _ADVICE,
    )
    NO_SUCH_MODEL = (
        "The server has no model of this name.",
        "Correct --model, or add the model to the server's repository and load it.",
    )
    MODEL_NOT_LOADED = (
        "The server has the model, but has not loaded it.",
        "Fix the cause that the server's reason names (its log has more), and load the model again.",
    )
    LIBRARY_MISSING = (
        "The Python that runs the model lacks shm_backend_utils, or a part of it.",
        "Install triton-shm-backend-utils for the server's Python, or into the model's folder: `pip install --no-deps "
        "--target MODEL_DIR/VERSION WHEEL`.",
    )
    REQUIRED_INPUTS = (
        "The model declares the direct path and has inputs that are not optional, so its session refused to load.",
        "Add `optional: true` to each input in config.pbtxt, and load the model again.",
    )
    CLIENT_SHM_DISABLED = (
        "The server does not register clients' memory, so the path triton-shm is closed, unlike the direct path.",
        "Start the server with --allow-client-shm=true (from 26.04 on) if tools or models need registered memory.",
        _ADVICE,
    )
    OTHER_MACHINE = (
        "The server is on another machine, and machines share no memory: requests go in band.",
        "Run client and server on one machine, for example as containers of one pod, or let requests go in band.",
    )
    OUT_OF_TIME = (
        "The doctor's time was up before everything was examined.",
        "Examine one model with --model; check whether the server is busy.",
    )

    # A model's configuration

    INPUTS_NOT_OPTIONAL = (
        "Some inputs are not optional, so Triton refuses requests of the direct path, which carry no bytes for inputs.",
        "Add `optional: true` to each of these inputs in config.pbtxt, and load the model again.",
    )
    NO_SHM_INPUT = (
        "The input SHM, which tells Triton's batcher the batch size of a request without bytes, is missing or wrong.",
        f"With batches, give the model the input `{CARRIER_LINE}` in config.pbtxt; rename an input SHM of your own.",
    )
    NO_SHM_PATHS = (
        "The model does not declare the direct path, so clients take slower ones.",
        f"If its model.py uses ShmSession, add `{PATHS_LINE}` in config.pbtxt, and load the model again.",
    )
    UNKNOWN_PATH = (
        f"The parameter {PATHS_PARAMETER} names a path that does not exist, so the model declares none.",
        f"Correct {PATHS_PARAMETER} in config.pbtxt, and load the model again: valid words are "
        f"{', '.join(sorted(PATHS))}, separated by commas.",
    )
    DIRECT_NOT_DECLARED = (
        f"The parameter {PATHS_PARAMETER} leaves out the direct path, so clients take slower ones.",
        f"If its model.py uses ShmSession, add `direct` to {PATHS_PARAMETER} in config.pbtxt, and load the model "
        f"again.",
        _ADVICE,
    )
    UNKNOWN_PARAMETER = (
        f"A parameter whose name begins with {PREFIX} is unknown to this library, which refuses to load the model.",
        "Correct its name in config.pbtxt, or remove it, and load the model again.",
    )
    BAD_PARAMETER = (
        "A parameter of this library has an invalid value, so the model does not load.",
        "Correct the value in config.pbtxt, and load the model again.",
    )
    REFUSED_LINE = (
        "The configuration has a setting that ShmSession does not support, so the model does not load.",
        "Remove it from config.pbtxt, or serve this model without ShmSession.",
    )
    RESPONSE_CACHE = (
        "Triton's response cache compares only input tensors: a cached response would write nothing to the client's "
        "memory.",
        "Remove `response_cache` from config.pbtxt, and load the model again.",
    )

    # A model's folder

    NOT_A_MODEL = (
        "The folder is neither a model's nor a repository of models, so the doctor cannot examine it.",
        f"Name a folder with {CONFIG_FILE} or 1/model.py, or a folder that contains such folders.",
    )
    UNREADABLE = (
        "A file or folder of the model cannot be read.",
        "Let this user and the server's user read it: chmod a+rX, or change its owner.",
    )
    CONFIG_NOT_READ = (
        f"{CONFIG_FILE} is not a model's configuration in protobuf's text format, so Triton does not load the model.",
        "Correct the line that the finding names.",
    )
    BAD_TENSOR = (
        f"An input or output in {CONFIG_FILE} is incomplete or invalid, so Triton does not load the model.",
        f"Correct it in {CONFIG_FILE}.",
    )
    NO_CONFIG = (
        f"The model has no {CONFIG_FILE}, and model.py does not complete the configuration by itself.",
        f"Add {CONFIG_FILE}, or auto_complete_config to model.py that ends with shm_backend_utils.model.auto_complete.",
    )
    OTHER_NAME = (
        f"{CONFIG_FILE} gives the model another name than its folder has, so Triton does not load it.",
        "Rename one of them, or leave out `name`.",
    )
    NO_VERSION_FOLDER = (
        "The model has no version folder, so Triton does not load it.",
        "Put the model's code into 1/model.py in its folder.",
    )
    NO_MODEL_CODE = (
        "A version folder lacks the model's code, so Triton does not load that version.",
        "Put model.py, or the file that default_model_filename names, into it.",
    )
    NOT_RETURNED = (
        "The execute function drops the responses of a session's call, so clients wait until they time out.",
        "Write `return` before the call: `return self.session.serve(requests, self.infer)`.",
    )
    OTHER_MODE = (
        "Code and configuration disagree on whether the model is decoupled, so requests fail.",
        "For serve_streams write `model_transaction_policy { decoupled: true }` in config.pbtxt; for serve leave it "
        "out.",
    )
    CODE_DOES_NOT_PARSE = (
        "This interpreter cannot parse the model's code, so the model does not load.",
        "Correct the line that the finding names.",
    )
    NO_MODEL_CLASS = (
        "The model's code defines no TritonPythonModel, so Triton does not load it.",
        "Name the model's class TritonPythonModel.",
    )
    UNKNOWN_NAME = (
        "The model's code names a tensor that its configuration lacks, or another model that the repository lacks.",
        "Correct the name in the line that the finding names, or in the configuration.",
    )
    ORDINARY_MODEL = (
        "The model's configuration has nothing of this library, so requests take Triton's own paths.",
        f"If model.py makes a ShmSession, add `{PATHS_LINE}` in config.pbtxt, and load the model again; if not, do "
        "nothing, or use ShmSession for the direct path.",
        _ADVICE,
    )
    OTHER_COPY = (
        "The model's folder has a copy of another release of this library, and model.py may import it.",
        "Remove it, put this release there by `pip install --no-deps --target MODEL_DIR/VERSION WHEEL`, and load the "
        "model again.",
    )

    # Between this process and a loaded model, as a probe shows it

    FORWARD_FAILS = (
        "The model's calls of other models (call.forward) keep failing, because they get no shared memory.",
        "Fix the cause that the finding names: room in /dev/shm, its mode, or a service that removes files there "
        "(systemd: RemoveIPC=no).",
    )
    LIFE_UNKNOWN = (
        "The doctor cannot tell from here if the model's process is alive: this Triton reports dead models as ready.",
        "Run the doctor on the server's machine, in its container and as its user.",
        _ADVICE,
    )
    DEAD_INSTANCE = (
        "Some of the model's processes are dead, though the server reports it as ready: requests sent to them fail.",
        _LOAD_AGAIN,
    )
    DEAD_STUB = (
        "The model's process is dead, though the server reports it as ready: every request fails.",
        _LOAD_AGAIN,
    )
    NO_SESSION = (
        "The model declares the direct path, but no session answers: its code uses none, or execute fails before that.",
        "Serve requests with ShmSession in model.py, and fix errors in execute; or remove SHM_PATHS and the input "
        "SHM from config.pbtxt.",
    )
    MODEL_BUSY = (
        "The model did not answer in time: it is busy, it hangs, or it has no slot for another sequence.",
        "Run the doctor again later; let execute return the responses of session.serve; if it hangs, load it again.",
    )
    NEEDS_GRPC = (
        "The model is decoupled, but Triton has no streams over HTTP.",
        "Use a gRPC URL for it.",
        _ADVICE,
    )
    OTHER_PROTOCOL = (
        "Model and client speak different versions of the protocol, so the direct path is closed.",
        "Install the same release of triton-shm-backend-utils on both sides.",
    )
    OTHER_VERSION = (
        "Model and client have different versions of this library, but speak the same protocol.",
        "Install the same release on both sides when convenient.",
        _ADVICE,
    )
    OTHER_USER = (
        "The model may not open this user's memory: its owner is not allowed, or its mode excludes the server's user.",
        "List both the server's user and this one in the model's parameter SHM_ALLOWED_UIDS, as in `1000,1001`, and "
        "give the server's user access with PoolOptions(access=Access(0o660, GROUP_ID)); or run both as one user.",
    )
    OTHER_NAMESPACE = (
        "The server is on this machine, but shares neither the network namespace nor /dev/shm with this process.",
        "Share one of them: containers of one pod share the network (docker: --network=container:NAME); or --ipc=host, "
        "--ipc=container:NAME or one volume at /dev/shm on both sides.",
    )
    NO_SEALED_MEMORY = (
        "The model cannot fetch sealed memory, so clients use memory in /dev/shm, which is limited in size and "
        "outlives its owner.",
        "Run client and server in one network namespace: docker --network=container:NAME, containers of one pod.",
        _ADVICE,
    )
    REFUSED = (
        "The model refuses memory of this process.",
        "The refusal's text has the remedy.",
    )
    WRONG_REPORT = (
        "The model has answered the probe, but the client's memory does not hold its answer.",
        "Install the same release on both sides; if that does not help, report it with the output of --json.",
    )
    NUMPY_2_STRINGS = (
        "The model has strings and NumPy 2, and Triton's stub was built for NumPy 1: strings in band end its process.",
        "Install numpy<2 for the model, or use a newer Triton; strings on the direct path are not affected.",
    )
    NUMPY_2_OLD_STUB = (
        "The model has NumPy 2, and Triton's stub was built for NumPy 1: as_numpy() and Tensor() lose contents "
        "silently.",
        "Use the session's calls alone for tensors in model.py, or install numpy<2 for the model, or use a newer "
        "Triton.",
        _ADVICE,
    )
    NAMES_UNUSABLE = (
        "The model does not know its server's HTTP address, so it cannot resolve names of registered regions.",
        "Set the parameter SHM_SERVER_URL in config.pbtxt, if clients name registered regions.",
        _ADVICE,
    )
    DRIVER_NOT_SEEN = (
        "One side has a GPU, but the other sees no driver or no GPU, so tensors on GPUs cannot be shared.",
        "Start the container with --gpus, and install cuda-bindings on both sides; check it with nvidia-smi there.",
    )
    GPU_NOT_SEEN = (
        "Client and model see different GPUs, so tensors on a GPU that only one side sees cannot be shared.",
        "Give both the same GPUs, by UUID: CUDA_VISIBLE_DEVICES, or docker --gpus device=UUID.",
    )
    MIG = (
        "Client and model have different instances of a GPU (MIG), between which CUDA shares no memory.",
        "Give both the same instance, by its UUID: CUDA_VISIBLE_DEVICES=MIG-UUID.",
    )
    PID_NAMESPACE = (
        "Client and model have GPUs, but different PID namespaces; so CUDA IPC fails, by which they share tensors that "
        "are used in place, and the GPU memory of regions in /dev/shm.",
        "Share process ids: docker --pid=container:NAME, Kubernetes shareProcessNamespace: true.",
        _ADVICE,
    )

    # This machine, or container

    NO_DEV_SHM = (
        "The folder /dev/shm is missing. Triton's Python backend keeps its pools there, and clients keep their "
        "system regions there.",
        f"Mount a tmpfs there ({_MORE_ROOM}).",
    )
    DEV_SHM_NOT_WRITABLE = (
        "This user may not create files in /dev/shm, so its clients cannot have regions there.",
        "Give /dev/shm its usual mode (chmod 1777 /dev/shm), or mount it writable.",
    )
    DEV_SHM_SMALL = (
        "/dev/shm is small: Triton's Python backend keeps a pool there for each model instance, which grows with "
        "requests.",
        f"Give it more room ({_MORE_ROOM}).",
        _ADVICE,
    )
    DEV_SHM_FULL = (
        "/dev/shm has hardly any room left: requests go in band then, or fail.",
        "List its users with `shm-backend-utils regions`, and remove files there, or give it more room "
        f"({_MORE_ROOM}).",
    )
    STALE_REGIONS = (
        "/dev/shm has regions whose owner is dead; they take up its room.",
        "Remove them with `shm-backend-utils regions --reap`, as the user who owns them. Clients and models do so, "
        "too, when they start.",
        _ADVICE,
    )
    LEFTOVER_POOLS = (
        "/dev/shm has pools of Triton's Python backend that no process here has mapped: a killed server leaves them "
        "behind.",
        "List them with `shm-backend-utils regions`. If no server of another container has this /dev/shm, remove them: "
        "rm /dev/shm/NAME.",
        _ADVICE,
    )
    LITTLE_MEMORY = (
        "This machine, or its container, has hardly any memory left; shared memory counts towards it.",
        f"End programs that use a lot, or {MORE_MEMORY}.",
    )

    def __init__(self, what: str, remedy: str, is_fatal: bool = True) -> None:
        self.what = what
        self.remedy = remedy
        self.is_fatal = is_fatal

    @property
    def code(self) -> str:
        """Its name in lower case with hyphens, as no-shm-input; the same from version to version."""
        return self.name.lower().replace("_", "-")
