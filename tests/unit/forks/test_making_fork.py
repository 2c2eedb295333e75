"""A fork while another thread makes a region: its child has nothing of it, and so keeps no memory and no lock alive."""

from __future__ import annotations

import pytest

from tests.unit.forks.programs import run_program

# `making` makes a region in a thread, and forks when that comes to a certain function; the child finds what it has.
MAKING = """
    import threading
    from pathlib import Path
    from shm_backend_utils.memory.access import PRIVATE
    from shm_backend_utils.memory.handover import desk
    from shm_backend_utils.memory.kinds import RegionKind
    from shm_backend_utils.memory.pool.slot import SlotRegion

    def files():
        found = [os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.exists() or each.is_symlink()]
        return sorted(each for each in found if not each.startswith(("/proc/", "pipe:")))

    def making(kind, place, name):
        is_there, may_go_on, usual = threading.Event(), threading.Event(), getattr(place, name)

        def stopping(*arguments):
            outcome = usual(*arguments)
            is_there.set()
            may_go_on.wait()
            return outcome

        before = files()
        setattr(place, name, stopping)
        made = []
        make = lambda: made.append(SlotRegion(4096, 1, 4096, PRIVATE, kind=kind))
        thread = threading.Thread(target=make, daemon=True)
        thread.start()
        is_there.wait()
        setattr(place, name, usual)

        def work():
            assert files() == before, f"a child has {files()}, and before there was {before}"

        assert files() != before
        in_child(work)
        may_go_on.set()
        thread.join()
        made[0].destroy()
"""


@pytest.mark.parametrize("kind", ["SYSTEM", "SEALED"])
@pytest.mark.parametrize("place", ["os, 'posix_fallocate'", "fcntl, 'fcntl'"])
def test_a_child_has_no_region_that_is_just_being_made(kind: str, place: str) -> None:
    run_program(
        "os._exit",
        MAKING,
        f"""
        import fcntl
        making(RegionKind.{kind}, {place})
        """,
    )


def test_a_child_has_no_desk_that_is_just_being_opened() -> None:
    run_program("os._exit", MAKING, "making(RegionKind.SEALED, desk, 'SealedKey')")


def test_a_child_has_no_copy_that_is_just_being_handed_over() -> None:
    run_program(
        "os._exit",
        MAKING,
        """
        from shm_backend_utils.memory.handover.office import OFFICE

        region = SlotRegion(4096, 1, 4096, PRIVATE, kind=RegionKind.SEALED)
        (offer,) = OFFICE._offers.values()
        copied = offer.copy()  # as the desk's thread does

        def work():
            assert copied.fileno() == -1

        in_child(work)
        assert copied.fileno() >= 0
        region.destroy()
        """,
    )
