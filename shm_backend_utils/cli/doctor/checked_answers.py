"""What servers and models tell, in the form that it should have: whoever answers may be anybody."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from google.protobuf import json_format
from tritonclient.grpc import model_config_pb2, service_pb2

from ...client.transports.grpc.codec import GrpcCodec

__all__ = ["checked_config", "checked_report"]

_CODEC: Final = GrpcCodec()
_FLAGS: Final = ("stub_reads_numpy", "knows_server")
_TEXTS: Final = ("version", "numpy")


def checked_config(told: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model's configuration as Triton writes it in JSON, whoever wrote this one; ValueError if it is none."""
    message = model_config_pb2.ModelConfig()
    try:
        text = json.dumps(told, ensure_ascii=False).encode()
        json_format.Parse(text, message, ignore_unknown_fields=True)
    except (json_format.ParseError, UnicodeEncodeError) as error:
        raise ValueError(str(error)) from None
    return _CODEC.told(service_pb2.ModelConfigResponse(config=message))


def checked_report(told: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model's report without what is not of the type that the protocol says, as if it had not told that."""
    gpus = told.get("gpus")
    report: dict[str, Any] = {name: told[name] for name in _FLAGS if isinstance(told.get(name), bool)}
    report |= {name: told[name] for name in _TEXTS if isinstance(told.get(name), str)}
    report["namespaces"] = _of_type(told.get("namespaces"), int)
    report["visible_devices"] = _of_type(told.get("visible_devices"), str)
    if isinstance(gpus, Mapping):
        uuids, obstacle = gpus.get("uuids"), gpus.get("obstacle")
        report["gpus"] = {
            "uuids": [each for each in uuids if isinstance(each, str)] if isinstance(uuids, list) else [],
            "obstacle": obstacle if isinstance(obstacle, str) else "",
        }
    return report


def _of_type(told: Any, kind: type) -> dict[str, Any]:
    return {name: each for name, each in told.items() if isinstance(each, kind)} if isinstance(told, Mapping) else {}
