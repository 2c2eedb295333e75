"""What a client takes that wants huge pages, where an administrator has set some aside, and where not."""

from __future__ import annotations

import errno
import functools
import os
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import pytest

from shm_backend_utils.client.errors import InferenceError
from shm_backend_utils.client.explanation import Check, Explanation
from shm_backend_utils.client.known_model import KnownModel
from shm_backend_utils.client.paths.choice import PathChooser
from shm_backend_utils.client.paths.triton_shm import Registrations
from shm_backend_utils.client.steps import Offload, Steps
from shm_backend_utils.client.transports.http.codec import HttpCodec
from shm_backend_utils.errors import CallerError, NoSharedMemoryError
from shm_backend_utils.memory import sealed, shared_file
from shm_backend_utils.memory.access import PRIVATE
from shm_backend_utils.memory.descriptors import Descriptor
from shm_backend_utils.memory.kinds import HUGE_PAGE_SIZE, RegionKind
from shm_backend_utils.memory.pool.need import Need
from shm_backend_utils.memory.pool.options import PoolOptions, RegionName
from shm_backend_utils.memory.pool.pool import SlotPool
from shm_backend_utils.memory.pool.slot import SlotRegion
from shm_backend_utils.model_spec import ModelSpec
from shm_backend_utils.protocol.layout import PAGE_SIZE

T = TypeVar("T")
REFUSED = "shm:refused: regions[0] was refused: its pages have 2097152 bytes"
STALE = "shm:stale: a request that was given up"
SAY = "bytes of huge pages were asked for, and the machine has not so many of them free; set some aside"
MODEL = {
    "name": "resize",
    "input": [{"name": "X", "data_type": "TYPE_FP32", "dims": [-1], "optional": True}],
    "parameters": {"SHM_PATHS": {"string_value": "direct,inline"}},
}


def free_huge_pages() -> int:
    """Return how many of 2 MiB nobody has taken."""
    folder = Path(f"/sys/kernel/mm/hugepages/hugepages-{HUGE_PAGE_SIZE // 1024}kB")
    if not folder.exists():
        return 0
    return int((folder / "free_hugepages").read_text()) - int((folder / "resv_hugepages").read_text())


needs_huge_pages = pytest.mark.skipif(
    free_huge_pages() < 2, reason="this machine's administrator has set no huge pages aside (vm.nr_hugepages)"
)


@pytest.fixture
def none_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose huge pages are all taken, whatever this one has."""

    def allocate(fd: int, *arguments: Any) -> None:
        if os.fstatvfs(fd).f_bsize == HUGE_PAGE_SIZE:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        shared_file.allocate(fd, *arguments)

    monkeypatch.setattr(sealed, "allocate", allocate)


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with huge pages, as far as it is seen from here: they are ordinary ones."""
    make = functools.partial(Descriptor, os.memfd_create, "shmbu", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    monkeypatch.setattr(sealed, "_memory", lambda _: make())


def chooser_of(options: PoolOptions) -> tuple[PathChooser, KnownModel]:
    codec = HttpCodec()
    known = KnownModel(ModelSpec.from_config(MODEL), head_room=1)
    return PathChooser(codec, "localhost", Registrations(codec), options, 0), known


def explained(options: PoolOptions, *answers: str) -> tuple[Explanation, KnownModel]:
    """Return what a client finds out; its model has opened what it is not said to have refused."""
    chooser, known = chooser_of(options)
    return answered(chooser.explain(known, 1.0), *answers, STALE), known


def answered(operation: Steps[T], *answers: str) -> T:
    """Do an operation; the server registers no memory, and the model answers so, in turn."""
    refusals = ["it was not started with --allow-client-shm=true", *answers]
    try:
        step = next(operation)
        while True:
            if isinstance(step, Offload):
                step = operation.send(step.work())
            else:
                step = operation.throw(InferenceError(refusals.pop(0)))
    except StopIteration as end:
        value: T = end.value
        return value


def found(explanation: Explanation, name: str) -> Check | None:
    return next((check for check in explanation.checks if check.name == name), None)


@pytest.mark.usefixtures("none_left")
def test_where_there_are_none_the_error_says_how_many_to_set_aside() -> None:
    with pytest.raises(NoSharedMemoryError, match=f"^{2 * HUGE_PAGE_SIZE} {SAY} .*vm.nr_hugepages=2 or more"):
        SlotRegion(HUGE_PAGE_SIZE, 1, PAGE_SIZE, PRIVATE, kind=RegionKind.HUGE)


@pytest.mark.skipif(free_huge_pages() > 0, reason="this machine's administrator has set huge pages aside")
def test_a_machine_without_any_says_so_itself() -> None:
    with pytest.raises(NoSharedMemoryError, match=SAY):
        SlotRegion(PAGE_SIZE, 1, PAGE_SIZE, PRIVATE, kind=RegionKind.HUGE)


def refuse(*_: object) -> NoReturn:
    raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


def test_a_kernel_without_huge_pages_is_told_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "memfd_create", refuse)
    with pytest.raises(NoSharedMemoryError, match=SAY):
        SlotRegion(PAGE_SIZE, 1, PAGE_SIZE, PRIVATE, kind=RegionKind.HUGE)


@needs_huge_pages
def test_a_region_of_huge_pages_takes_whole_ones() -> None:
    region = SlotRegion(PAGE_SIZE, 1, PAGE_SIZE, PRIVATE, kind=RegionKind.HUGE)
    assert region.byte_size == HUGE_PAGE_SIZE
    assert os.fstatvfs(region.fd).f_bsize == HUGE_PAGE_SIZE
    region.destroy()


@needs_huge_pages
def test_what_is_destroyed_gives_its_huge_pages_back() -> None:
    before = free_huge_pages()
    region = SlotRegion(PAGE_SIZE, 1, PAGE_SIZE, PRIVATE, kind=RegionKind.HUGE)
    assert free_huge_pages() == before - 1
    region.destroy()
    assert free_huge_pages() == before


@pytest.mark.usefixtures("pretended")
def test_a_client_takes_them_where_there_are_some() -> None:
    explanation, known = explained(PoolOptions(huge_pages=True))
    assert found(explanation, "huge pages?") is None
    assert known.kind is RegionKind.HUGE


@pytest.mark.usefixtures("pretended")
def test_a_model_that_takes_none_gets_ordinary_pages(caplog: pytest.LogCaptureFixture) -> None:
    explanation, known = explained(PoolOptions(huge_pages=True), REFUSED)
    check = found(explanation, "huge pages?")
    assert check is not None
    assert check.detail.startswith("ordinary ones are taken instead: the model could not fetch it: shm:refused")
    assert known.kind is RegionKind.SEALED
    assert "calls of model 'resize' take sealed memory of ordinary pages" in caplog.text


@pytest.mark.usefixtures("pretended")
def test_a_model_that_refuses_them_later_gets_ordinary_pages() -> None:
    chooser, known = chooser_of(PoolOptions(huge_pages=True))
    answered(chooser.explain(known, 1.0), STALE)
    chooser.refuse(known, "direct", "request parameter shm_slot refused: its pages have 2097152 bytes")
    explanation = answered(chooser.explain(known, 1.0))
    check = found(explanation, "huge pages?")
    assert check is not None
    assert (explanation.path, known.kind) == ("direct", RegionKind.SEALED)


@pytest.mark.usefixtures("none_left")
def test_a_client_that_may_choose_takes_ordinary_pages_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    explanation, known = explained(PoolOptions(huge_pages=True))
    check = found(explanation, "huge pages?")
    assert check is not None
    assert (check.outcome, check.needed_by) == (False, ())
    assert check.detail.startswith(f"ordinary ones are taken instead: {HUGE_PAGE_SIZE} {SAY}")
    assert (explanation.path, known.kind) == ("direct", RegionKind.SEALED)
    (message,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert message.startswith(f"calls of model 'resize' take sealed memory of ordinary pages: {HUGE_PAGE_SIZE} {SAY}")


@pytest.mark.usefixtures("none_left")
def test_a_client_that_demands_sealed_memory_gets_no_other(caplog: pytest.LogCaptureFixture) -> None:
    explanation, _ = explained(PoolOptions(region="sealed", huge_pages=True))
    check = found(explanation, "sealed memory?")
    assert check is not None
    assert (check.outcome, check.needed_by) == (False, ("direct",))
    assert SAY in explanation.reason
    assert explanation.path == "inline"


@pytest.mark.parametrize("region", ["auto", "sealed", "system"])
def test_nobody_looks_for_them_who_does_not_want_them(region: RegionName) -> None:
    explanation, known = explained(PoolOptions(region=region))
    assert found(explanation, "huge pages?") is None
    assert known.kind is not RegionKind.HUGE


@pytest.mark.usefixtures("none_left")
def test_when_they_run_out_later_calls_take_ordinary_pages_and_say_so(caplog: pytest.LogCaptureFixture) -> None:
    pool = SlotPool(PoolOptions(huge_pages=True))
    region, _memory = pool.redeem(pool.request(Need(PAGE_SIZE, kind=RegionKind.HUGE), "resize"))
    assert region.kind is RegionKind.SEALED
    assert "sealed memory is taken in ordinary pages" in caplog.text
    pool.close()


@pytest.mark.usefixtures("none_left")
def test_when_they_run_out_calls_that_demand_them_fail() -> None:
    pool = SlotPool(PoolOptions(region="sealed", huge_pages=True))
    with pytest.raises(NoSharedMemoryError, match=SAY):
        pool.redeem(pool.request(Need(PAGE_SIZE, kind=RegionKind.HUGE), "resize"))
    pool.close()


def test_memory_in_dev_shm_has_none() -> None:
    with pytest.raises(CallerError, match='regions of /dev/shm have none; expected region="sealed" or "auto"'):
        PoolOptions(region="system", huge_pages=True)
