"""Count the bytes that a request really puts on the wire.

A relay between client and server passes every gRPC message on as it is, and adds up the lengths of those that belong to
inferences: the serialized request and its response. It sees what any client sends, without asking the client.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Final

import grpc

__all__ = ["Relay", "relay_to"]

_INFER: Final = "/inference.GRPCInferenceService/ModelInfer"
_UNLIMITED: Final = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


class Relay(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Passes messages on, from clients that connect to ``url``, and counts the bytes of inference both ways."""

    def __init__(self, channel: Any) -> None:
        self._channel = channel
        self.url = ""
        self.byte_count = 0

    def service(self, handler_call_details: Any) -> Any:
        """Return the handler for a call, in which messages are bytes: no serializer is given to either side."""
        method = handler_call_details.method
        call = self._channel.unary_unary(method)

        def pass_on(request: bytes, context: Any) -> bytes:
            try:
                response: bytes = call(request)
            except grpc.RpcError as error:
                context.abort(error.code(), error.details())
            if method == _INFER:
                self.byte_count += len(request) + len(response)
            return response

        return grpc.unary_unary_rpc_method_handler(pass_on)


@contextmanager
def relay_to(server_url: str) -> Iterator[Relay]:
    """Run a relay to a server on a free loopback port."""
    with grpc.insecure_channel(server_url, options=_UNLIMITED) as channel, ThreadPoolExecutor(2) as threads:
        relay = Relay(channel)
        server = grpc.server(threads, handlers=[relay], options=_UNLIMITED)
        relay.url = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        try:
            yield relay
        finally:
            server.stop(grace=None).wait()
