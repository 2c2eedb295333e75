"""A request as the KServe v2 protocol has it over HTTP: JSON, followed by the tensors' bytes.

Triton's extension for binary tensors wants the size of the JSON in a header of its own, ``_JSON_SIZE``.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple
from urllib.parse import quote

from tritonclient.http import InferenceServerClient, InferResult

from ..errors import ShmError
from ..protocol.descriptor import GENERATION_PARAMETER
from .errors import InferenceError, translated

__all__ = ["Answer", "HttpMessage", "encode", "path_of"]

_JSON_SIZE: Final = "Inference-Header-Content-Length"
_COMPRESS: Final[Mapping[str, Callable[[bytes], bytes]]] = {"gzip": gzip.compress, "deflate": zlib.compress}


class HttpMessage(NamedTuple):
    """What one call of ``infer`` sends. A request may be sent again, with other parameters.

    Attributes
    ----------
    path : str
    headers : mapping
        Without those that tell of the body's form.
    head : bytes
        The JSON. Its last member is ``parameters``, where there are any, so that one more is easily added.
    tensors : bytes
        What follows it.
    compression : str or None
    """

    path: str
    headers: Mapping[str, str]
    head: bytes
    tensors: bytes
    compression: str | None

    def form(self, generation: int) -> tuple[bytes, dict[str, str]]:
        """Return body and headers; ``generation`` is added to the parameters if it is not 0."""
        head = self.head
        if generation:
            head = b'%b,"%b":%d}}' % (head[:-2], GENERATION_PARAMETER.encode(), generation)
        headers = {**self.headers, _JSON_SIZE: str(len(head))}
        body = head + self.tensors if self.tensors else head
        if self.compression is not None:
            headers |= {"Content-Encoding": self.compression, "Accept-Encoding": self.compression}
            body = _COMPRESS[self.compression](body)
        return body, headers


class Answer(NamedTuple):
    """What a server answers; the names of headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def result(self) -> Any:
        """Return the result of an inference as tritonclient has it."""
        size = self.headers.get(_JSON_SIZE.lower())
        return InferResult.from_response_body(
            self.body, header_length=None if size is None else int(size), content_encoding=self._encoding
        )

    def json(self) -> Any:
        """Return what the body says."""
        return json.loads(self.body)

    def error(self, address: str) -> ShmError | None:
        """Return the error, if the answer is one; ``address`` is for the message."""
        if self.status == 200:
            return None
        try:
            reason = self.json()["error"]
        except (ValueError, LookupError, TypeError):  # something between us and Triton answers in words of its own
            text = self.body[:200].decode(errors="replace").strip()
            return InferenceError(f"{address} answered {text!r}, which is not Triton's way", str(self.status))
        return translated(str(self.status), str(reason), address)

    @property
    def _encoding(self) -> str | None:
        return self.headers.get("content-encoding")


def encode(arguments: dict[str, Any]) -> HttpMessage:
    """Return a request as a message; ``arguments`` are those of tritonclient's ``infer``."""
    compression = arguments.pop("compression", None)
    headers = arguments.pop("headers", {})
    path = f"{path_of('models', arguments.pop('model_name'), arguments.pop('model_version', ''))}/infer"
    body, size = InferenceServerClient.generate_request_body(**arguments)
    size = len(body) if size is None else size
    members = json.loads(body[:size])
    if "parameters" in members:
        members["parameters"] = members.pop("parameters")
    return HttpMessage(path, headers, json.dumps(members, separators=(",", ":")).encode(), body[size:], compression)


def path_of(kind: str, name: str, version: str = "") -> str:
    """Return the path of something that the server has under a name."""
    path = f"/v2/{kind}/{quote(name, safe='')}"
    return f"{path}/versions/{quote(version, safe='')}" if version else path
