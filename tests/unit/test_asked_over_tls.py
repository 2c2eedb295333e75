"""How a model asks for names where TLS lies between: it waits no longer for that."""

from __future__ import annotations

import contextlib
import functools
import socket
import ssl
import threading
from http.client import HTTPSConnection

import pytest

from shm_backend_utils.errors import MachineError
from shm_backend_utils.http import kept_connections
from shm_backend_utils.memory import registrations
from shm_backend_utils.memory.registrations import StatusEndpoint


def without_certificates(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers("AECDH:@SECLEVEL=0")
    return context


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 200 OK\r\n"], ids=["nothing", "the beginning of an answer"])
def test_the_wait_for_an_answer_over_tls_has_an_end(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registrations, "_TIMEOUT_S", 0.3)
    client = functools.partial(HTTPSConnection, context=without_certificates(ssl.PROTOCOL_TLS_CLIENT))
    monkeypatch.setitem(kept_connections._SCHEMES, "https", client)
    server = without_certificates(ssl.PROTOCOL_TLS_SERVER)
    asked: list[bytes] = []
    stop = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            plain, _ = listening.accept()
            with contextlib.suppress(OSError), server.wrap_socket(plain, server_side=True) as connection:
                asked.append(connection.recv(4096))
                connection.sendall(said)
                stop.wait(30)

        server_thread = threading.Thread(target=serve)
        server_thread.start()
        asking = StatusEndpoint(f"https://127.0.0.1:{listening.getsockname()[1]}")
        errors: list[BaseException] = []

        def ask() -> None:
            try:
                asking.find(["mine"])
            except MachineError as error:
                errors.append(error)

        asking_thread = threading.Thread(target=ask, daemon=True)
        asking_thread.start()
        asking_thread.join(3)
        stop.set()
        server_thread.join()
        assert asked[0].startswith(b"GET /v2/systemsharedmemory/region/mine/status ")
        assert [type(error) for error in errors] == [MachineError]
