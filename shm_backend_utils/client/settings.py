"""The checked options of one call, with its client's defaults."""

from __future__ import annotations

import sys
import time
from typing import Any, Final, NamedTuple

from ..errors import CallerError
from ..gpu.streams import Named, named
from ..process import NOT_THE_USERS, Origin
from .options import (
    LibraryName,
    PathName,
    RequestOptions,
    Tls,
    check_inline_bytes,
    check_library,
    check_options,
    check_path,
    check_timeout,
    tls_context,
)
from .transports.messages import split_url
from .transports.transport import Connectable

__all__ = ["CallSettings", "ClientSettings"]

_NO_OPTIONS: Final = RequestOptions()


class CallSettings(NamedTuple):
    model: str
    version: str  # empty if the server chooses
    path: str  # ``"auto"``, or a path's name
    deadline: float  # by ``time.monotonic()``
    options: RequestOptions  # a copy: the user's own objects may change
    origin: Origin  # the place in the user's code that makes the call
    named: Named = ()  # the GPU work that the call waits for; if empty, all work of its GPUs
    library: str | None = None  # whose arrays hold outputs on GPUs


class ClientSettings:
    """A client's settings; CallerError if they are wrong, or contradict each other."""

    def __init__(
        self,
        url: str | Connectable,
        timeout_s: float,
        path: PathName,
        tls: Tls | None,
        wait_ready_s: float | None = None,
        inline_bytes: int | None = None,
    ) -> None:
        is_secure = not isinstance(url, Connectable) and split_url(url)[1]
        if tls is not None and not is_secure:
            raise CallerError(f"tls was given, but URL {url!r} does not use TLS; write grpcs:// or https://")
        if tls is not None:
            tls_context(tls)  # raises if the certificates cannot be read
        self.url = url
        self.timeout_s = check_timeout(timeout_s)
        self.tls = tls
        self.wait_ready_s = None if wait_ready_s is None else check_timeout(wait_ready_s, "wait_ready_s")
        self.inline_bytes = None if inline_bytes is None else check_inline_bytes(inline_bytes)
        self._path = check_path(path)

    def __repr__(self) -> str:
        """Return server and path, without a URL's secrets: a password, or a token."""
        if isinstance(self.url, Connectable):
            return f"{self.url!r} path={self._path}"
        scheme, address = self.url.split("://") if "://" in self.url else ("grpc", self.url)
        shown = address.rpartition("@")[2].partition("?")[0]
        return f"{f'{scheme}://{shown}'!r} path={self._path}"

    def timeout_of(self, timeout_s: float | None) -> float:
        """Return a call's time limit in seconds; the client's if the call gives none."""
        return self.timeout_s if timeout_s is None else check_timeout(timeout_s)

    def of_call(
        self,
        what: str,
        model: str,
        path: PathName | None,
        timeout_s: float | None,
        options: RequestOptions,
        cuda_stream: Any = None,
        library: LibraryName | None = None,
    ) -> CallSettings:
        """Check a call's options; raise CallerError or TypeError."""
        if not isinstance(model, str):
            raise CallerError(f"model is of type {type(model).__name__}; expected a str: the model's name comes first")
        checked = check_options(options) if options else _NO_OPTIONS
        frame = sys._getframe()
        while frame.f_back is not None and frame.f_code.co_filename.startswith(NOT_THE_USERS):
            frame = frame.f_back  # does what Origin.here does, but faster, as every call runs this
        return CallSettings(
            model,
            checked.get("model_version", ""),
            self._path if path is None else check_path(path),
            time.monotonic() + (self.timeout_s if timeout_s is None else check_timeout(timeout_s)),
            checked,
            Origin(what, frame.f_code, frame.f_lasti),
            () if cuda_stream is None else named(cuda_stream),
            None if library is None else check_library(library),
        )
