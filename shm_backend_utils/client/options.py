"""The options of a call, mostly named as in tritonclient, and those of TLS."""

from __future__ import annotations

import importlib.util
import numbers
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, Literal, TypedDict, cast, get_args

import numpy as np

from ..errors import CallerError, name_list, shown
from ..memory.pool.options import PoolOptions
from ..protocol.parameters import DESCRIPTOR_PARAMETER, GENERATION_PARAMETER, SLOT_PARAMETER
from .errors import TimeoutValueError

__all__ = [
    "LibraryName",
    "PathName",
    "RequestOptions",
    "Tls",
    "check_inline_bytes",
    "check_is_installed",
    "check_keywords",
    "check_library",
    "check_options",
    "check_path",
    "check_timeout",
    "tls_context",
]

PathName = Literal["auto", "direct", "triton-shm", "inline"]
LibraryName = Literal["torch", "cupy", "jax", "numba"]

_A_YEAR_S: Final = 366 * 86400.0
# Request parameters that Triton keeps for itself: its protocol extensions for sequences, scheduling and binary data.
_RESERVED: Final = frozenset(
    {"sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "headers", "binary_data_output"}
)
_OURS: Final = frozenset({SLOT_PARAMETER, GENERATION_PARAMETER, DESCRIPTOR_PARAMETER})
_PATHS: Final = get_args(PathName)
_LIBRARIES: Final = get_args(LibraryName)
_COMPRESSIONS: Final = ("gzip", "deflate")
_KINDS: Final[Mapping[str, tuple[Any, str, Callable[[Any], Any]]]] = {
    "model_version": (str, "a str that UTF-8 can encode, such as '1'", str),
    "request_id": (str, "a str that UTF-8 can encode", str),
    "sequence_id": (
        (numbers.Integral, str),
        "an integer, or a str that UTF-8 can encode",
        lambda value: value if isinstance(value, str) else int(value),
    ),
    "sequence_start": (object, "a bool", bool),
    "sequence_end": (object, "a bool", bool),
    "priority": (numbers.Integral, "an integer", int),
    "queue_timeout_us": (numbers.Integral, "an integer: microseconds", int),
    "headers": (Mapping, "a mapping", dict),
    "parameters": (Mapping, "a mapping", dict),
}
"""For each option, the type, the type in words, and a function that copies the value as one that JSON can hold."""
_DASHES: Final = str.maketrans("", "", "-_.")
_LIMITS: Final = {"priority": 2**64, "sequence_id": 2**64, "queue_timeout_us": 2**63}


class RequestOptions(TypedDict, total=False):
    """Optional keyword arguments of every call, mostly named as in ``tritonclient``'s ``infer``.

    Attributes
    ----------
    model_version : str
        By default the server chooses.
    request_id : str
    sequence_id : int or str
        For stateful models; with ``sequence_start`` and ``sequence_end``.
    priority : int
    queue_timeout_us : int
        Microseconds that the request may wait in the server's queue, if the model allows that: Triton's own parameter
        ``timeout``. ``timeout_s`` limits how long this client waits for an answer.
    headers : mapping of str to str
        HTTP headers, or gRPC metadata.
    compression : str
        ``"gzip"`` or ``"deflate"``, for the bytes that do cross the network.
    parameters : mapping
        The request's own parameters: str, int, float or bool.
    """

    model_version: str
    request_id: str
    sequence_id: int | str
    sequence_start: bool
    sequence_end: bool
    priority: int
    queue_timeout_us: int
    headers: Mapping[str, str]
    compression: str
    parameters: Mapping[str, Any]


_NAMES: Final = frozenset(RequestOptions.__annotations__)
_OF_CALLS: Final = (
    *sorted(_NAMES),
    *("cuda_stream", "frames", "inputs", "library", "model", "outputs", "path", "split", "timeout_s"),
)
# Names that tritonclient, or another method, gives to options with other names here.
_REMEDIES: Final = {
    "client_timeout": "use timeout_s, in seconds",
    "timeout": "use timeout_s, in seconds, or queue_timeout_us, for the server's queue",
    "request_compression_algorithm": "use compression, which is for both directions",
    "response_compression_algorithm": "use compression, which is for both directions",
    "callback": "use submit(), whose future has add_done_callback(), or AsyncShmClient",
    "query_params": "use parameters, which Triton passes on to the model",
    "device": "use outputs={'OUTPUT0': 'cuda:0'}; inputs are used where they are",
    "region": "give it when you create the client: pool=PoolOptions(region=...)",
    "frames": "only stream() has frames",
    "split": "only infer() can split a batch",
    "stream": "use cuda_stream, for the streams of a GPU",
    "cuda_stream": "infer(), submit() and stream() take it, and a prepared call by infer() or inputs_ready()",
    "library": "infer(), stream() and prepare() take it",
}


@dataclass(frozen=True)
class Tls:
    """Certificates for ``grpcs://`` and ``https://``, each the path of a PEM file.

    Attributes
    ----------
    root_certificates : str or None
        The authorities that may sign the server's certificate. None for this machine's over HTTP, grpcio's over gRPC.
    private_key, certificate_chain : str or None
        The client's own key and certificate, if the server asks for them.
    """

    root_certificates: str | None = None
    private_key: str | None = None
    certificate_chain: str | None = None


_OF_CLIENTS: Final = ("cuda", "inline_bytes", "path", "pool", "timeout_s", "tls", "url", "wait_ready_s")
_OF_TLS: Final = "begin the URL with grpcs:// or https://, and say tls=Tls(...) for certificates of your own"
_REMEDIES_OF_CLIENTS: Final = {
    **{field.name: f"say pool=PoolOptions({field.name}=...)" for field in fields(PoolOptions)},
    **dict.fromkeys(("ssl", "ssl_options", "ssl_context_factory", "creds"), _OF_TLS),
    **dict.fromkeys(("root_certificates", "private_key", "certificate_chain"), _OF_TLS),
    **dict.fromkeys(("connection_timeout", "network_timeout"), "use timeout_s, in seconds"),
}


def check_keywords(client: str, unknown: Mapping[str, object]) -> None:
    """Raise TypeError for a keyword argument that no client takes; the message says what to write instead."""
    for name in unknown:
        remedy = _remedy(name, _REMEDIES_OF_CLIENTS, _OF_CLIENTS)
        raise TypeError(f"{client}() has no keyword argument {name!r}; {remedy}")


def check_options(options: RequestOptions) -> RequestOptions:
    """Return a copy of the options that are not None; TypeError for an unknown one, CallerError for a wrong value."""
    for name in sorted(options.keys() - _NAMES):
        raise TypeError(f"there is no keyword argument {name!r}; {_remedy(name, _REMEDIES, _OF_CALLS)}")
    checked: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    for name in _KINDS.keys() & checked.keys():
        value, (kind, what, kept) = checked[name], _KINDS[name]
        if not isinstance(value, kind) or (isinstance(value, str) and not _is_text(value)):
            raise CallerError(f"{name} is {value!r}; expected {what}")
        checked[name] = kept(value)
    for name, limit in _LIMITS.items():
        value = checked.get(name, 0)
        if not isinstance(value, str) and not 0 <= value < limit:
            raise CallerError(f"{name} is {value}; expected 0 or more, and less than {limit}")
    _check_parameters(checked.get("parameters", {}))
    for name, value in checked.get("headers", {}).items():
        # gRPC has bytes under names that end in "-bin".
        is_value = isinstance(value, bytes) or _is_printable(value)
        if not (is_value and _is_printable(name) and name.translate(_DASHES).isalnum()):
            raise CallerError(
                f"header {shown(name)} cannot be sent; expected a str of printable ASCII, under a name of letters, "
                "digits, '-', '_' and '.'; encode other text, by urllib.parse.quote for example"
            )
    compression = checked.get("compression")
    if compression is not None and compression not in _COMPRESSIONS:
        raise CallerError(f"compression is {compression!r}; expected {' or '.join(map(repr, _COMPRESSIONS))}")
    return cast(RequestOptions, checked)


def _check_parameters(parameters: Mapping[str, Any]) -> None:
    for name in parameters:
        if not _is_text(name):
            raise CallerError(f"parameters has the name {shown(name)}; expected a str that UTF-8 can encode")
        if name in _OURS:
            raise CallerError(f"the client sets parameter {name!r} itself; leave it out")
        if name in _RESERVED or name.startswith("triton_"):
            raise CallerError(f"parameter {name!r} is reserved by Triton; use the keyword argument, or another name")
    for name, value in parameters.items():
        if not isinstance(value, int | float) and not _is_text(value):
            raise CallerError(
                f"parameter {name!r} is {value!r}; expected a str, a bool, an int of 64 bits, or a float"
                f"{'; write .item() for a number of NumPy' if isinstance(value, numbers.Real) else ''}"
            )


def _is_text(value: object) -> bool:
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


def _is_printable(text: object) -> bool:
    return isinstance(text, str) and text.isascii() and text.isprintable()


def _remedy(name: str, remedies: Mapping[str, str], known: Sequence[str]) -> str:
    return remedies.get(name) or f"expected some of {name_list(name, known)}"


def check_path(path: str) -> str:
    if path not in _PATHS:
        raise CallerError(f"path is {path!r}; expected one of {', '.join(_PATHS)}")
    return path


def check_library(library: str) -> str:
    if library not in _LIBRARIES:
        raise CallerError(f"library is {shown(library)}; expected one of {', '.join(map(repr, _LIBRARIES))}")
    return library


def check_is_installed(library: str | None) -> None:
    """Raise :class:`CallerError` if an array library that a call needs is not installed, or is torch without CUDA."""
    if library is None:
        return
    if importlib.util.find_spec(library) is None:
        raise CallerError(f"library is {library!r}, which is not installed here; install it, or leave library out")
    if library == "torch" and not importlib.import_module(library).backends.cuda.is_built():
        raise CallerError(
            "library is 'torch', which is built without CUDA here; install a build with CUDA, or leave library out"
        )


def tls_context(tls: Tls) -> ssl.SSLContext:
    """Return an SSL context with the certificates; CallerError if a file cannot be read."""
    try:
        context = ssl.create_default_context(cafile=tls.root_certificates)
        if tls.certificate_chain is not None:
            context.load_cert_chain(tls.certificate_chain, tls.private_key)
    except OSError as error:  # also ssl.SSLError
        files = ", ".join(str(file) for file in vars(tls).values() if file)
        raise CallerError(f"Tls({files}) cannot be read: {error}; expected files in PEM format") from None
    return context


def check_inline_bytes(inline_bytes: object) -> int:
    if not isinstance(inline_bytes, numbers.Integral) or inline_bytes < 0:
        raise CallerError(f"inline_bytes is {inline_bytes!r}; expected a whole number of bytes, 0 for none")
    return int(inline_bytes)


def check_timeout(timeout_s: object, name: str = "timeout_s") -> float:
    """Return the time to wait, in seconds, or raise :class:`TimeoutValueError`."""
    if not (isinstance(timeout_s, int | float | np.integer | np.floating) and 0 < timeout_s <= _A_YEAR_S):  # nor NaN
        raise TimeoutValueError(f"{name} is {timeout_s!r}; expected a number of seconds above 0, and at most a year")
    return float(timeout_s)
