"""What can be wrong with a server, with the way to it, and with the state of its models."""

from __future__ import annotations

from typing import Final

from ..findings import Trouble

BAD_URL: Final = Trouble(
    "bad-url",
    "The URL does not name a server.",
    "Write HOST:PORT or grpc://HOST:PORT for gRPC, http://HOST:PORT for HTTP, grpcs:// or https:// with TLS.",
)
UNKNOWN_HOST: Final = Trouble(
    "unknown-host",
    "This machine cannot resolve the host name in the URL.",
    "Correct the name, or make it known: in a pod it is localhost, with Compose the service's name.",
)
SERVER_NOT_REACHABLE: Final = Trouble(
    "server-not-reachable",
    "Nobody answers at the address, so no request gets anywhere.",
    "Start the server, or correct the address: by default Triton's gRPC is on 8001 and its HTTP on 8000. Publish "
    "the port of a container.",
)
NO_ANSWER: Final = Trouble(
    "no-answer",
    "Something accepts connections at the address, and does not answer.",
    "See whether the server hangs (its log, its load), and restart it; if it speaks TLS, write grpcs:// or https://.",
)
WRONG_PORT: Final = Trouble(
    "wrong-port",
    "What listens at the address speaks another protocol than the URL says.",
    "Use grpc:// with Triton's gRPC port, by default 8001, and http:// with its HTTP port, by default 8000.",
)
TLS_MISMATCH: Final = Trouble(
    "tls",
    "Only one side speaks TLS, or the server's certificate is not trusted here.",
    "Write grpcs:// or https:// only where the server speaks TLS; have SSL_CERT_FILE or the system's store trust its "
    "certificate.",
)
NOT_TRITON: Final = Trouble(
    "not-triton",
    "What answers at the address is not Triton.",
    "Correct host and port: by default Triton's HTTP is on 8000 and its gRPC on 8001; on 8002 it has only its metrics.",
)
SERVER_NOT_READY: Final = Trouble(
    "server-not-ready",
    "The server answers, and is not ready: it still loads models, some have not loaded, or the process of one is dead.",
    "Wait until it has loaded them, or mend the models that are named below; load those anew whose process is dead.",
)
NO_INDEX: Final = Trouble(
    "no-index",
    "The server does not tell which models it has, so none was examined.",
    "Ask for one model by --model, or have what stands before the server let the repository index through.",
)
NO_MODELS: Final = Trouble(
    "no-models",
    "The server has loaded nothing, so no request can be served.",
    "Add a model to the server's repository, and load it.",
)
NO_OWN_REGION: Final = Trouble(
    "no-own-region",
    "This process can make no region in /dev/shm: the path triton-shm is closed to it, and it needs sealed memory.",
    "Do what the finding about /dev/shm says; where there is none, the system's reason tells what is lacking.",
    is_fatal=False,
)
NO_SUCH_MODEL: Final = Trouble(
    "no-such-model",
    "The server has no model of this name.",
    "Correct --model, or add the model to the server's repository and load it.",
)
MODEL_NOT_LOADED: Final = Trouble(
    "model-not-loaded",
    "The server has the model, and has not loaded it.",
    "Mend what the reason names (the server's log has more), and load the model again.",
)
LIBRARY_MISSING: Final = Trouble(
    "library-missing",
    "The Python that runs the model has no shm_backend_utils, or not all of it.",
    "Install triton-shm-backend-utils for the server's Python, or into the model's folder: "
    "`pip install --no-deps --target MODEL_DIR/VERSION WHEEL`.",
)
REQUIRED_INPUTS: Final = Trouble(
    "required-inputs",
    "The model declares the direct path and has inputs that are not optional, so its session refused to load.",
    "Add `optional: true` to each input in config.pbtxt, and load the model again.",
)
CLIENT_SHM_DISABLED: Final = Trouble(
    "client-shm-disabled",
    "The server registers no clients' memory, so the path triton-shm is closed; the direct path needs none of it.",
    "Start the server with --allow-client-shm=true (from 26.04 on) if tools or models need registered memory.",
    is_fatal=False,
)
OTHER_MACHINE: Final = Trouble(
    "other-machine",
    "The server is on another machine, and machines share no memory: requests go in band.",
    "Run client and server on one machine, for example as containers of one pod; otherwise there is nothing to mend.",
)
OUT_OF_TIME: Final = Trouble(
    "out-of-time",
    "The time was up before everything was examined.",
    "Examine one model with --model; see whether the server is busy.",
)
