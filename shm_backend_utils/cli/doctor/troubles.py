"""All troubles that the doctor knows: each has a code and one remedy.

The page ``docs/troubleshooting.md`` has a row for each.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

from ...memory.machine import MORE_MEMORY
from ...model.config import PREFIX
from ...model_spec import BATCH_CARRIER, PATHS, PATHS_LINE, PATHS_PARAMETER
from ...repository.files import CONFIG_FILE

__all__ = ["Trouble"]

_ADVICE: Final = False  # the exit status stays 0
_CARRIER: Final = f'{{ name: "{BATCH_CARRIER}" data_type: TYPE_UINT8 dims: [ -1 ] optional: true }}'
_LOAD_AGAIN: Final = (
    "Load the model again, or restart the server; the server's log, or the kernel's, has the cause of death."
)
_MORE_ROOM: Final = "docker: --shm-size; Kubernetes: an emptyDir of medium Memory mounted at /dev/shm"


class Trouble(Enum):
    """A fault that happens in practice, in one sentence, and its remedy.

    If it is fatal, requests fail, or are slower than they need be; else it is a piece of advice.
    """

    # The server, the way to it, and the state of its models

    BAD_URL = (
        "The URL does not name a server.",
        "Write HOST:PORT or grpc://HOST:PORT for gRPC, http://HOST:PORT for HTTP, grpcs:// or https:// with TLS.",
    )
    UNKNOWN_HOST = (
        "This machine cannot resolve the host name in the URL.",
        "Correct the name, or make it known: in a pod it is localhost, with Compose the service's name.",
    )
    SERVER_NOT_REACHABLE = (
        "No program answers at the address, so no request gets anywhere.",
        "Start the server, or correct the address: by default Triton's gRPC is on 8001 and its HTTP on 8000. Publish "
        "the port of a container.",
    )
    NO_ANSWER = (
        "Something accepts connections at the address, and does not answer.",
        "See whether the server hangs (its log, its load), and restart it; if it speaks TLS, write grpcs:// or "
        "https://.",
    )
    WRONG_PORT = (
        "The program at the address speaks another protocol than the URL says.",
        "Use grpc:// with Triton's gRPC port, by default 8001, and http:// with its HTTP port, by default 8000.",
    )
    TLS = (
        "Only one side speaks TLS, or the server's certificate is not trusted here.",
        "Write grpcs:// or https:// only where the server speaks TLS; have SSL_CERT_FILE or the system's store trust "
        "its certificate.",
    )
    NOT_TRITON = (
        "The program at the address is not Triton.",
        "Correct host and port: by default Triton's HTTP is on 8000 and its gRPC on 8001; on 8002 it has only its "
        "metrics.",
    )
    SERVER_NOT_READY = (
        "The server answers, and is not ready: it still loads models, some have not loaded, or the process of one is "
        "dead.",
        "Wait until it has loaded them, or mend the models that are named below; load those anew whose process is "
        "dead.",
    )
    NO_INDEX = (
        "The server does not tell which models it has, so none was examined.",
        "Ask for one model by --model, or let the proxy before the server pass the repository index.",
    )
    NO_MODELS = (
        "The server has loaded nothing, so no request can be served.",
        "Add a model to the server's repository, and load it.",
    )
    NO_OWN_REGION = (
        "This process can make no region in /dev/shm: the path triton-shm is closed to it, and it needs sealed memory.",
        "Follow the finding about /dev/shm; without one, the system's reason names the cause.",
        _ADVICE,
    )
    NO_SUCH_MODEL = (
        "The server has no model of this name.",
        "Correct --model, or add the model to the server's repository and load it.",
    )
    MODEL_NOT_LOADED = (
        "The server has the model, and has not loaded it.",
        "Mend the cause that the reason names (the server's log has more), and load the model again.",
    )
    LIBRARY_MISSING = (
        "The Python that runs the model has no shm_backend_utils, or not all of it.",
        "Install triton-shm-backend-utils for the server's Python, or into the model's folder: `pip install --no-deps "
        "--target MODEL_DIR/VERSION WHEEL`.",
    )
    REQUIRED_INPUTS = (
        "The model declares the direct path and has inputs that are not optional, so its session refused to load.",
        "Add `optional: true` to each input in config.pbtxt, and load the model again.",
    )
    CLIENT_SHM_DISABLED = (
        "The server registers no clients' memory, so the path triton-shm is closed; the direct path needs none of it.",
        "Start the server with --allow-client-shm=true (from 26.04 on) if tools or models need registered memory.",
        _ADVICE,
    )
    OTHER_MACHINE = (
        "The server is on another machine, and machines share no memory: requests go in band.",
        "Run client and server on one machine, for example as containers of one pod, or let requests go in band.",
    )
    OUT_OF_TIME = (
        "The time was up before everything was examined.",
        "Examine one model with --model; see whether the server is busy.",
    )

    # A model's configuration

    INPUTS_NOT_OPTIONAL = (
        "Triton refuses a request of the direct path, which carries no bytes for the model's inputs.",
        "Add `optional: true` to each of these inputs in config.pbtxt, and load the model again.",
    )
    NO_SHM_INPUT = (
        "The model has batches, and no input that tells Triton's batcher the batch size of a request without bytes.",
        f"Add the input `{_CARRIER}` in config.pbtxt, and load the model again.",
    )
    NO_SHM_PATHS = (
        "The model does not tell clients that it serves the direct path, so they take slower ones.",
        f"If its model.py uses ShmSession, add `{PATHS_LINE}` in config.pbtxt, and load the model again.",
    )
    UNKNOWN_PATH = (
        f"The parameter {PATHS_PARAMETER} names a path that does not exist, so the model declares none.",
        f"Correct {PATHS_PARAMETER} in config.pbtxt, and load the model again: its words are "
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
        "A parameter of this library has a value that is not valid, and the model does not load.",
        "Correct the value in config.pbtxt, and load the model again.",
    )
    REFUSED_LINE = (
        "The configuration has something that no ShmSession can serve, and the model does not load.",
        "Remove it from config.pbtxt, or serve this model without ShmSession.",
    )
    RESPONSE_CACHE = (
        "Triton's response cache looks at input tensors only: a cached answer would leave the client's memory as it "
        "was.",
        "Remove `response_cache` from config.pbtxt, and load the model again.",
    )

    # A model's folder

    NOT_A_MODEL = (
        "The folder is neither a model's nor a repository of models, so the doctor cannot examine it.",
        f"Name a folder with {CONFIG_FILE} or 1/model.py, or one that has such folders.",
    )
    UNREADABLE = (
        "A file or folder of the model cannot be read.",
        "Let this user and the server's user read it: chmod a+rX, or change its owner.",
    )
    CONFIG_NOT_READ = (
        f"{CONFIG_FILE} is not a model's configuration in protobuf's text format, and Triton does not load the model.",
        "Correct the line that is named.",
    )
    BAD_TENSOR = (
        f"An input or output in {CONFIG_FILE} is incomplete or not valid, and Triton does not load the model.",
        f"Correct it in {CONFIG_FILE}.",
    )
    NO_CONFIG = (
        f"The model has no {CONFIG_FILE}, and model.py does not complete the configuration by itself.",
        f"Add {CONFIG_FILE}, or auto_complete_config to model.py that ends with shm_backend_utils.model.auto_complete.",
    )
    OTHER_NAME = (
        f"{CONFIG_FILE} gives the model another name than its folder has, and Triton does not load it.",
        "Rename one of them, or leave `name` out.",
    )
    NO_VERSION_FOLDER = (
        "The model has no folder of a version, and Triton does not load it.",
        "Put the model's code into 1/model.py in its folder.",
    )
    NO_MODEL_CODE = (
        "A folder of a version lacks the model's code, and Triton does not load that version.",
        "Put model.py, or the file that default_model_filename names, into it.",
    )
    NOT_RETURNED = (
        "A call of the session answers requests, and execute drops the answers: clients wait until their time is over.",
        "Write `return` before it: `return self.session.serve(requests, self.infer)`.",
    )
    OTHER_MODE = (
        "Code and configuration do not agree on whether the model is decoupled, and requests fail.",
        "For serve_streams write `model_transaction_policy { decoupled: true }` in config.pbtxt; for serve leave it "
        "out.",
    )
    CODE_DOES_NOT_PARSE = (
        "This interpreter cannot parse the model's code, and the model does not load.",
        "Correct the line that is named.",
    )
    NO_MODEL_CLASS = (
        "The model's code defines no TritonPythonModel, and Triton does not load it.",
        "Name the model's class TritonPythonModel.",
    )
    UNKNOWN_NAME = (
        "The model's code names a tensor that its configuration does not have, or another model that is not there.",
        "Correct the name in the line that is named, or in the configuration.",
    )
    ORDINARY_MODEL = (
        "The model uses nothing of this library: its requests take Triton's own paths.",
        "Nothing, if you want that; else use ShmSession in model.py, and set SHM_PATHS in config.pbtxt.",
        _ADVICE,
    )
    OTHER_COPY = (
        "The model's folder has a copy of this library that is not of this release, and model.py may import it.",
        "Remove it, put this release there by `pip install --no-deps --target MODEL_DIR/VERSION WHEEL`, and load the "
        "model again.",
    )

    # Between this process and a loaded model, as a probe shows it

    FORWARD_FAILS = (
        "The model's calls of other models (call.forward) keep failing, because they get no shared memory.",
        "Mend the cause that the finding names: room in /dev/shm, its mode, or a service that removes files there "
        "(systemd: RemoveIPC=no).",
    )
    LIFE_UNKNOWN = (
        "The doctor cannot tell from here whether the model's process lives: this Triton calls dead models ready, too.",
        "Run the doctor on the server's machine, in its container and as its user.",
        _ADVICE,
    )
    DEAD_INSTANCE = (
        "Some of the model's processes are dead, though the server calls the model ready: requests that they get fail.",
        _LOAD_AGAIN,
    )
    DEAD_STUB = (
        "The model's process is dead, though the server calls the model ready: every request fails.",
        _LOAD_AGAIN,
    )
    NO_SESSION = (
        "The model declares the direct path, and no session answers: its code uses none, or execute fails before that.",
        "Serve requests by ShmSession in model.py, and mend the errors of execute; or remove SHM_PATHS and the input "
        "SHM from config.pbtxt.",
    )
    MODEL_BUSY = (
        "The model did not answer in time: it is busy, or it hangs, or has no slot for one more sequence.",
        "Ask again later; let execute return the responses of session.serve; if it hangs, load it again.",
    )
    NEEDS_GRPC = (
        "The model is decoupled, and Triton has no streams over HTTP.",
        "Use a gRPC URL for it.",
        _ADVICE,
    )
    OTHER_PROTOCOL = (
        "Model and client speak different versions of the protocol, so the direct path is closed.",
        "Install the same release of triton-shm-backend-utils on both sides.",
    )
    OTHER_VERSION = (
        "The model's library is of another version than this one; they speak one protocol.",
        "Install the same release on both sides when it suits.",
        _ADVICE,
    )
    OTHER_USER = (
        "The model may not open this user's memory: it belongs to another user, or its mode keeps the server out.",
        "Name the server's user and this one, both, in the model's parameter SHM_ALLOWED_UIDS, as `1000,1001`, and let "
        "the server's user in by PoolOptions(access=Access(0o660, GROUP_ID)); or run both as one user.",
    )
    OTHER_NAMESPACE = (
        "The server is on this machine, and shares neither the network namespace nor /dev/shm with this process.",
        "Share one of them: containers of one pod share the network (docker: --network=container:NAME); or --ipc=host, "
        "--ipc=container:NAME or one volume at /dev/shm on both sides.",
    )
    NO_SEALED_MEMORY = (
        "The model cannot fetch sealed memory, so clients take memory in /dev/shm, which has a size and outlives its "
        "owner.",
        "Run client and server in one network namespace: docker --network=container:NAME, containers of one pod.",
        _ADVICE,
    )
    REFUSED = (
        "The model refuses memory of this process.",
        "The refusal's text has the remedy.",
    )
    WRONG_REPORT = (
        "The model has answered the probe, and the client's memory does not hold its answer.",
        "Install the same release on both sides; if it stays so, report it with the output of --json.",
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
        "The model does not know where its server answers over HTTP, so registered names mean nothing to it.",
        "Set the parameter SHM_SERVER_URL in config.pbtxt, if clients name registered regions.",
        _ADVICE,
    )
    DRIVER_NOT_SEEN = (
        "One side has a GPU, and the other one sees no driver or no GPU: tensors on GPUs cannot be shared.",
        "Start the container with --gpus, and install cuda-bindings on both sides; see nvidia-smi there.",
    )
    GPU_NOT_SEEN = (
        "Client and model see different GPUs, so tensors on those that only one sees cannot be shared.",
        "Give both the same GPUs, by UUID: CUDA_VISIBLE_DEVICES, or docker --gpus device=UUID.",
    )
    MIG = (
        "Client and model have different instances of a GPU (MIG), between which CUDA shares no memory.",
        "Give both the same instance, by its UUID: CUDA_VISIBLE_DEVICES=MIG-UUID.",
    )
    PID_NAMESPACE = (
        "Client and model have GPUs and different PID namespaces; CUDA takes a handle of a process with its own number "
        "for one of its own.",
        "Share process ids: docker --pid=container:NAME, Kubernetes shareProcessNamespace: true.",
        _ADVICE,
    )

    # This machine, or container

    NO_DEV_SHM = (
        "The folder /dev/shm is missing. Triton's Python backend has its pools there, and clients their system "
        "regions.",
        f"Mount a tmpfs there ({_MORE_ROOM}).",
    )
    DEV_SHM_NOT_WRITABLE = (
        "This user may not make files in /dev/shm, so its clients can have no regions there.",
        "Give /dev/shm its usual mode (chmod 1777 /dev/shm), or mount it so that it can be written to.",
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
        "There are regions in /dev/shm whose owner is dead; they take its room.",
        "Remove them with `shm-backend-utils regions --reap`, each user his own. Clients and models do so, too, when "
        "they start.",
        _ADVICE,
    )
    LEFTOVER_POOLS = (
        "There are pools of Triton's Python backend in /dev/shm that no process here has mapped: a server that was "
        "killed leaves them.",
        "See which with `shm-backend-utils regions`. If no server of another container has this /dev/shm, remove them: "
        "rm /dev/shm/NAME.",
        _ADVICE,
    )
    LITTLE_MEMORY = (
        "This machine, or its container, has hardly any memory left; shared memory counts towards it.",
        f"End programs that use much, or {MORE_MEMORY}.",
    )

    def __init__(self, what: str, remedy: str, is_fatal: bool = True) -> None:
        self.what = what
        self.remedy = remedy
        self.is_fatal = is_fatal

    @property
    def code(self) -> str:
        """Its name in lower case with hyphens, as no-shm-input; the same from version to version."""
        return self.name.lower().replace("_", "-")
