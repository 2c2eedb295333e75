"""The other models of the server, as its HTTP endpoint describes them (``GET v2/models/NAME/config``)."""

from __future__ import annotations

import urllib.error
from http.client import HTTPException
from typing import Final
from urllib.parse import quote

from ...errors import ModelError, PeerError
from ...http.json_answers import fetch_json
from ...model_spec import ModelSpec

__all__ = ["ModelSpecs"]

_TIMEOUT_S: Final = 5.0


class ModelSpecs:
    """What is known of other models, by the HTTP endpoint. Asked for once, until :meth:`forget`."""

    def __init__(self, server_url: str) -> None:
        self._server_url = server_url
        self._specs: dict[tuple[str, str], ModelSpec] = {}

    def spec(self, model: str, version: str) -> ModelSpec | None:
        """Return a model's configuration; None if the server does not tell, as it serves no HTTP there.

        ModelError if there is no such model.
        """
        key = (model, version)
        spec = self._specs.get(key) or self._ask(model, version)
        if spec is not None:  # else the server may tell the next time
            self._specs[key] = spec
        return spec

    def forget(self, model: str) -> None:
        """Ask anew the next time: the model may have been loaded with another configuration."""
        self._specs = {key: spec for key, spec in self._specs.items() if key[0] != model}

    def _ask(self, model: str, version: str) -> ModelSpec | None:
        place = quote(model, safe="") + (f"/versions/{quote(version, safe='')}" if version else "")
        try:
            return ModelSpec.of_server(model, fetch_json(f"{self._server_url}/v2/models/{place}/config", _TIMEOUT_S))
        except urllib.error.HTTPError as error:
            with error:
                raise ModelError(f"model {model!r} cannot be called: the server has no such model ready") from None
        except (OSError, HTTPException, ValueError, PeerError):
            return None
