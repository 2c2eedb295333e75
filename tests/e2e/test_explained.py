"""What a client says of its paths and of sealed memory, wherever its server is; and that it says nothing unasked."""

from __future__ import annotations

import logging
import subprocess
import sys

import numpy as np
import pytest

from shm_backend_utils.client import PathUnavailableError, PoolOptions
from shm_backend_utils.client.errors import MemoryRefusedError
from shm_backend_utils.client.explanation import Check, Explanation
from shm_backend_utils.client.paths import choice as paths
from shm_backend_utils.client.paths import triton_shm as registration
from shm_backend_utils.client.steps import Steps
from shm_backend_utils.memory.segment import SealedSegment, SystemSegment
from shm_backend_utils.protocol.handover import SealedKey

from .flavours import AnyClient, Flavour
from .own_regions import own_regions

X = {"X": np.ones(4, np.float32)}
ROOM = {"Y": 16}
BY_NOBODY = "do not share a network namespace"


def check_of(explanation: Explanation) -> Check:
    return next(check for check in explanation.checks if check.name == "sealed memory?")


def infer(client: AnyClient) -> set[type]:
    """Infer, and return what the memory was made of."""
    with client.infer("direct_only", X, outputs=ROOM) as result:
        assert result.path == "direct"
        assert result["Y"].tolist() == [1] * 4
        return {type(region) for region in own_regions()}


def name_a_socket_that_nobody_has(patch: pytest.MonkeyPatch) -> None:
    """Have models look for this process' handover server where none is, as in another network namespace."""
    patch.setattr(SealedKey, "__str__", lambda key: f"shmbu-fd-{'0' * 32}-{key.number}")


@pytest.mark.parametrize("region", ["auto", "sealed"])
def test_where_it_can_be_fetched_it_is_taken(any_client: AnyClient) -> None:
    check = check_of(any_client.explain("direct_only"))
    assert check.outcome is True
    assert "the model has fetched some by a socket" in check.detail
    assert infer(any_client) == {SealedSegment}


def test_where_it_cannot_be_fetched_dev_shm_is_taken_or_else_the_path_is_closed(
    flavour: Flavour, monkeypatch: pytest.MonkeyPatch
) -> None:
    name_a_socket_that_nobody_has(monkeypatch)
    with flavour.client() as client:
        explanation = client.explain("direct_only")
        check = check_of(explanation)
        assert check.outcome is False
        assert "the model could not fetch it" in check.detail
        assert BY_NOBODY in check.detail
        assert explanation.path == "direct"
        assert explanation.reason.startswith("only a call can tell: SHM_ALLOWED_UIDS is not set")
        assert infer(client) == {SystemSegment}
        assert client.stats().retries == 0
    with flavour.client(pool=PoolOptions(region="sealed")) as client:
        with pytest.raises(PathUnavailableError, match=rf'{BY_NOBODY} .*PoolOptions\(region="system"\)'):
            client.infer("direct_only", X)
        explanation = client.explain("rows")
        assert explanation.path == "triton-shm"
        assert BY_NOBODY in explanation.reason


@pytest.mark.parametrize("region", ["auto"])
def test_what_cannot_be_fetched_any_more_is_replaced_by_memory_in_dev_shm_with_a_warning(
    any_client: AnyClient, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    any_client.explain("direct_only")
    name_a_socket_that_nobody_has(monkeypatch)
    with caplog.at_level(logging.WARNING):
        assert SystemSegment in infer(any_client)
    assert "calls of model 'direct_only' take memory in /dev/shm from now on" in caplog.text
    assert "shm_slot is not handed over" in caplog.text


def test_a_server_in_another_container_that_shares_memory_gets_no_tensors(
    any_client: AnyClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "is_this_machine", lambda host: False)
    with any_client.infer("rows", {"X": np.ones((1, 4), np.float32)}, outputs=["DOUBLED"]) as result:
        assert result.path == "direct"
    assert "127.0.0.1 shares memory with this machine" in str(any_client.explain("rows"))


def test_a_client_on_another_machine_gets_the_same_inline(
    any_client: AnyClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> Steps[None]:
        raise MemoryRefusedError("Unable to open shared memory region")

    monkeypatch.setattr(paths, "is_this_machine", lambda host: False)
    monkeypatch.setattr(registration.Registrations, "add", refuse)
    x = np.arange(24, dtype=np.float32).reshape(6, 4)
    with any_client.infer("rows", {"X": x}, outputs=["DOUBLED"], split=True) as result:
        assert result.path == "inline"
        np.testing.assert_array_equal(result["DOUBLED"], x * 2)
    assert "127.0.0.1 is another machine, which shares no memory" in any_client.explain("rows").reason
    assert any_client.stats().pool_bytes == 0
    with pytest.raises(PathUnavailableError, match="is another machine, which shares no memory"):
        any_client.infer("direct_only", X)


EVERYTHING_ONCE = """
import asyncio, sys
import numpy as np
from shm_backend_utils.client import AsyncShmClient, InferenceError, ShmClient

url = sys.argv[1]
x = np.ones((9, 4), np.float32)
with ShmClient(url) as client:
    for path in ("direct", "triton-shm", "inline"):
        client.infer("rows", {"X": x}, split=True, path=path).release()
        client.submit("rows", {"X": x[:2]}, path=path).result().release()
        try:
            client.infer("rows", {"X": -x}, split=True, path=path)
        except InferenceError:
            pass
    client.explain("unaware")

async def main():
    async with AsyncShmClient(url) as client:
        for path in ("direct", "triton-shm", "inline"):
            (await client.infer("rows", {"X": x}, split=True, path=path)).release()

asyncio.run(main())
"""


def test_a_program_that_sets_up_no_logging_sees_none(flavour: Flavour) -> None:
    program = subprocess.run(
        [sys.executable, "-W", "ignore::UserWarning", "-c", EVERYTHING_ONCE, flavour.url],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (program.returncode, program.stdout, program.stderr) == (0, "", "")
