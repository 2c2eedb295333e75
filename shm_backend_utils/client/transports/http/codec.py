"""Messages of the KServe v2 protocol over HTTP: JSON, whose size is in a header, followed by the tensors' bytes."""

from __future__ import annotations

import base64
import contextlib
import functools
import gzip
import json
import math
import operator
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple
from urllib.parse import quote

import numpy as np
from tritonclient.http import InferResult
from tritonclient.utils import serialize_byte_tensor

from ....errors import CallerError, PeerError, ShmError
from ....model_spec import BATCH_CARRIER
from ....protocol.parameters import GENERATION_PARAMETER, SLOT_PARAMETER
from ...errors import ConnectionLostError, InferenceError, translated
from ...options import RequestOptions
from ..messages import Codec, InputTensor, Place, Question

__all__ = ["Answer", "HttpCodec", "HttpMessage"]

_JSON_SIZE: Final = "Inference-Header-Content-Length"
_COMPRESS: Final[Mapping[str, Callable[[bytes], bytes]]] = {"gzip": gzip.compress, "deflate": zlib.compress}
_IN_JSON: Final = json.JSONEncoder(separators=(",", ":")).encode
_NO_HEADERS: Final[Mapping[str, str]] = {}
_MAX_INT64: Final = 2**63 - 1
_MOST_JSON_BYTES: Final = 1 << 25  # bytes of an answer without tensors: the index of thousands of models
_BY_THE_SERVER: Final = 500
_NO_SUCH_PATH: Final = "Not Found"  # Triton answers unknown models and the like in more words
_IS_THIS_HTTP: Final = "is this Triton's HTTP port? By default HTTP is on 8000, and metrics are on 8002"
_PATHS: Final[Mapping[Question, str]] = {
    "server live": "/v2/health/live",
    "server ready": "/v2/health/ready",
    "server metadata": "/v2",
    "repository index": "/v2/repository/index",
}
_PATHS_OF_MODELS: Final[Mapping[Question, str]] = {
    "model ready": "/ready",
    "model metadata": "",
    "model config": "/config",
    "model statistics": "/stats",
}
_LARGE_GENERATION: Final = 10**18  # has as many digits as the largest generation
_OF_GATEWAYS: Final = frozenset({502, 504})  # Triton never sends these, and may still be executing the request


class HttpMessage(NamedTuple):
    method: str
    path: str
    body: Sequence[bytes | memoryview] | None = None  # in parts
    headers: Mapping[str, str] = _NO_HEADERS
    most_bytes: float = math.inf  # of the answer's body: one with tensors may have any size


class Answer(NamedTuple):
    status: int
    headers: Mapping[bytes, bytes]
    body: bytes

    def json(self) -> Any:
        """Return the body's value; raises ValueError if it is no JSON, or nested deeper than any of Triton's."""
        try:
            return json.loads(self.body)
        except RecursionError:
            raise ValueError("nested too deeply") from None

    def error(self, address: str) -> ShmError | None:
        """Return the error, if the answer is one; ``address`` is for the message."""
        if self.status == 200:
            return None
        reason: Any = None
        with contextlib.suppress(ValueError, LookupError, TypeError):
            reason = self.json()["error"]
        if reason is None or self.status in _OF_GATEWAYS:  # a proxy answers in its own words, not Triton
            text = self.body[:200].decode(errors="replace").strip()
            message = f"{address} answered {text!r}, which is not an answer of Triton's"
            if self.status < _BY_THE_SERVER:
                return InferenceError(f"{message}; {_IS_THIS_HTTP}", str(self.status))
            return ConnectionLostError(f"{message}; the model may have run, or be running", str(self.status))
        if reason == _NO_SUCH_PATH and "/" in address.partition("://")[2]:
            message = f"the server finds nothing there; check the path in {address}: Triton itself needs no path"
            return InferenceError(message, str(self.status))
        return translated(str(self.status), str(reason), address)


class HttpCodec(Codec):
    inline_bytes = 0

    def __init__(self) -> None:
        self._path_of = functools.cache(_path_of)

    def infer(
        self,
        model: str,
        options: RequestOptions,
        *,
        inputs: Sequence[InputTensor] = (),
        outputs: Mapping[str, Place | None] | None = None,
        batch_size: int | None = None,
        slot: tuple[str, int] | None = None,
    ) -> HttpMessage:
        tensors: list[bytes | memoryview] = []
        head: dict[str, Any] = {}
        if options.get("request_id"):
            head["id"] = options["request_id"]
        head["inputs"] = [_input(tensor, tensors) for tensor in inputs]
        if batch_size is not None:
            binary = {"binary_data_size": 0}
            carrier = {"name": BATCH_CARRIER, "shape": [batch_size, 0], "datatype": "UINT8", "parameters": binary}
            head["inputs"].append(carrier)
        parameters: dict[str, Any] = {**_checked(options["parameters"])} if "parameters" in options else {}
        if slot is not None:
            parameters[SLOT_PARAMETER], parameters[GENERATION_PARAMETER] = slot
        if outputs is None:
            parameters["binary_data_output"] = True
        else:
            head["outputs"] = [
                {"name": name, "parameters": {"binary_data": True} if place is None else _placed(place)}
                for name, place in outputs.items()
            ]
        if options:
            parameters |= _scheduling(options)
        if parameters:
            head["parameters"] = parameters
        text = _IN_JSON(head).encode()
        headers = {_JSON_SIZE: str(len(text))}
        body: Sequence[bytes | memoryview] = (text, *tensors)
        path = f"{self._path_of('models', model, options.get('model_version', ''))}/infer"
        if options:
            headers = {**options.get("headers", {}), **headers}
            if compression := options.get("compression"):
                headers |= {"Content-Encoding": compression, "Accept-Encoding": compression}
                body = (_COMPRESS[compression](b"".join(body)),)
        return HttpMessage("POST", path, body, headers)

    def for_slot(
        self, model: str, address: str, outputs: Iterable[str] | None, batch_size: int | None, options: RequestOptions
    ) -> Callable[[int], HttpMessage]:
        anew = super().for_slot(model, address, outputs, batch_size, options)
        if options:  # they may compress the body
            return anew
        method, path, body, headers, _ = anew(_LARGE_GENERATION)
        before, after = body[0].rsplit(b"%d" % _LARGE_GENERATION, 1)
        return lambda generation: HttpMessage(method, path, (b"%b%19d%b" % (before, generation, after),), headers)

    def ask(self, question: Question, model: str = "", version: str = "") -> HttpMessage:
        path = _PATHS.get(question)
        if path is None:
            named = _path_of("models", model, version) if model else "/v2/models"
            path = f"{named}{_PATHS_OF_MODELS[question]}"
        if question == "repository index":  # Triton answers this question only to POST
            return HttpMessage("POST", path, (b"{}",), most_bytes=_MOST_JSON_BYTES)
        return HttpMessage("GET", path, most_bytes=_MOST_JSON_BYTES)

    def load(self, model: str, parameters: Mapping[str, str | bytes]) -> HttpMessage:
        body = {
            name: value if isinstance(value, str) else base64.b64encode(value).decode()
            for name, value in parameters.items()
        }
        return _order(f"{_path_of('repository/models', model)}/load", body)

    def unload(self, model: str, *, dependents: bool) -> HttpMessage:
        return _order(f"{_path_of('repository/models', model)}/unload", {"unload_dependents": dependents})

    def register(self, name: str, key: str, byte_size: int) -> HttpMessage:
        order = json.dumps({"key": key, "offset": 0, "byte_size": byte_size}).encode()
        return HttpMessage("POST", f"{_path_of('systemsharedmemory/region', name)}/register", (order,))

    def unregister(self, name: str) -> HttpMessage:
        return HttpMessage("POST", f"{_path_of('systemsharedmemory/region', name)}/unregister", ())

    def result(self, answer: Answer) -> Any:
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in answer.headers.items()}
        size, encoding = headers.get(_JSON_SIZE.lower()), headers.get("content-encoding")
        try:
            length = None if size is None else int(size)
            return InferResult.from_response_body(answer.body, header_length=length, content_encoding=encoding)
        except Exception as error:  # tritonclient's, for bytes that are no answer to a request
            raise PeerError(f"the server's answer cannot be read: {error}; {_IS_THIS_HTTP}") from None

    def as_dict(self, answer: Answer) -> dict[str, Any]:
        try:
            body: Any = answer.json()
        except ValueError:
            text = answer.body[:50].decode(errors="replace").strip()
            raise InferenceError(
                f"the server answers {text!r}, which is not JSON; {_IS_THIS_HTTP}", str(answer.status)
            ) from None
        if isinstance(body, list):  # the repository index, which gRPC sends under this name
            return {"models": body}
        if not isinstance(body, dict):
            raise InferenceError(f"the server answers {str(body)[:50]!r}; {_IS_THIS_HTTP}", str(answer.status))
        return body

    def says_so(self, answer: Answer) -> bool:
        return True  # a server says no by an error

    def output_of(self, response: Any, name: str) -> tuple[str, tuple[int, ...]] | None:
        try:
            output = response.get_output(name)
            if output is None:
                return None
            return str(output["datatype"]), tuple(map(operator.index, output["shape"]))
        except Exception as error:  # the JSON may be anything
            raise PeerError(f"the server's answer describes output {name!r} in an unreadable way: {error}") from None


def _input(tensor: InputTensor, tensors: list[bytes | memoryview]) -> dict[str, Any]:
    made: dict[str, Any] = {"name": tensor.name, "shape": list(tensor.shape), "datatype": tensor.datatype}
    if isinstance(tensor.content, Place):
        made["parameters"] = _placed(tensor.content)
        return made
    data: bytes | memoryview = b""
    if tensor.datatype != "BYTES":
        data = np.ascontiguousarray(tensor.content).reshape(-1).view(np.uint8).data
    elif (serialized := serialize_byte_tensor(tensor.content)).size:
        data = bytes(serialized.item())
    made["parameters"] = {"binary_data_size": len(data)}
    tensors.append(data)
    return made


def _placed(place: Place) -> dict[str, Any]:
    parameters = {"shared_memory_region": place.region, "shared_memory_byte_size": place.byte_size}
    return {**parameters, "shared_memory_offset": place.offset} if place.offset else parameters


def _scheduling(options: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if options.get("sequence_id"):
        found = {name: options.get(name, False) for name in ("sequence_id", "sequence_start", "sequence_end")}
    if options.get("priority"):
        found["priority"] = options["priority"]
    if options.get("queue_timeout_us") is not None:
        found["timeout"] = options["queue_timeout_us"]
    return found


def _checked(parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    for name, value in parameters.items():
        if isinstance(value, int) and not -_MAX_INT64 - 1 <= value <= _MAX_INT64:
            raise CallerError(f"parameter {name!r} is {value!r}; expected a str, a bool, an int of 64 bits, or a float")
        if isinstance(value, float) and not math.isfinite(value):
            raise CallerError(f"parameter {name!r} is {value!r}, which JSON cannot express; send it as a str")
    return parameters


def _order(path: str, parameters: Mapping[str, Any]) -> HttpMessage:
    return HttpMessage("POST", path, (json.dumps({"parameters": parameters}).encode(),))


def _path_of(kind: str, name: str, version: str = "") -> str:
    path = f"/v2/{kind}/{quote(name, safe='')}"
    return f"{path}/versions/{quote(version, safe='')}" if version else path
