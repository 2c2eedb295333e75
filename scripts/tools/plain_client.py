"""Double random images on the direct path with nothing but tritonclient: regions of one's own, named in one parameter.

It is here to be read: this is all that a client in any language has to do. `docs/protocol.md` explains the parameter.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os

import numpy as np
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException, shared_memory


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/plain_client", description=__doc__.partition("\n")[0])
    parser.add_argument("--url", required=True, metavar="HOST:PORT", help="gRPC address of a server, see scripts/serve")
    parser.add_argument("--batch", type=int, default=4, metavar="N", help="images; default: %(default)s")
    arguments = parser.parse_args()
    images = np.random.default_rng().random((arguments.batch, 3, 224, 224), np.float32)
    name = f"plain-client-{os.getpid()}"
    with contextlib.ExitStack() as cleanup:
        region = shared_memory.create_shared_memory_region(name, f"/{name}", 2 * images.nbytes, create_only=True)
        cleanup.callback(shared_memory.destroy_shared_memory_region, region)
        shared_memory.set_shared_memory_region(region, [images])
        client = cleanup.enter_context(grpcclient.InferenceServerClient(arguments.url))
        client.register_system_shared_memory(name, f"/{name}", 2 * images.nbytes)
        cleanup.callback(client.unregister_system_shared_memory, name)

        descriptor = {
            "v": 1,
            "model": "multiply",
            "regions": [{"kind": "named", "name": name}],
            "inputs": {"INPUT0": [0, 0, images.nbytes, "FP32", list(images.shape)]},
            "outputs": {"OUTPUT0": [0, images.nbytes, images.nbytes]},
        }
        batch_size = grpcclient.InferInput("SHM", [arguments.batch, 0], "UINT8")  # Triton's batcher reads it off this
        batch_size.set_data_from_numpy(np.empty((arguments.batch, 0), np.uint8))
        reply = client.infer("multiply", [batch_size], parameters={"shm_io": json.dumps(descriptor)})

        doubled = shared_memory.get_contents_as_numpy(region, np.float32, images.shape, offset=images.nbytes).copy()
        summary = {
            "correct": np.array_equal(doubled, images * 2),
            "tensor_bytes": 2 * images.nbytes,
            "request_bytes": len(json.dumps(descriptor)),
            "reply_tensors": len(reply.get_response().outputs),
        }
        print(json.dumps(summary))


if __name__ == "__main__":
    try:
        main()
    except InferenceServerException as error:
        raise SystemExit(str(error)) from None
