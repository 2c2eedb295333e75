"""The pytest plugin, as somebody else's tests have it: in a process of their own, in an empty folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.harness.folders import folder_of
from tests.unit.plugin.outcomes import outcome_of

MODEL = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(*request.inputs()) for request in requests]

    def answer(self, x):
        return pb_utils.InferenceResponse([pb_utils.Tensor("Y", x.as_numpy() * 2)])
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder_of(tmp_path / "models", MODEL, name="doubled")
    return tmp_path


def test_a_test_that_leaves_shared_memory_behind_fails_whatever_the_order_of_its_arguments(project: Path) -> None:
    status, printed = outcome_of(
        project,
        """
        import os
        import pytest

        def made():
            name = f"/dev/shm/mine-{os.getpid()}"
            with open(name, "w"):
                os.unlink(name)
                yield

        memory, shared = pytest.fixture(made), pytest.fixture(made, scope="module")

        @pytest.fixture
        def left(memory):
            kept.append(open(f"/dev/shm/left-by-a-fixture-{os.getpid()}", "w"))
            os.unlink(kept[0].name)

        kept = []

        def test_before(memory, shm_leak_check): pass
        def test_behind(shm_leak_check, memory): pass
        def test_shared(shared, shm_leak_check): pass
        def test_found(left, shm_leak_check): pass

        def test_it(shm_leak_check):
            kept.append(open(f"/dev/shm/left-by-itself-{os.getpid()}", "w"))
            os.unlink(kept[1].name)
        """,
        "-W",
        "ignore::ResourceWarning",
    )
    assert (status, "5 passed, 2 errors" in printed) == (1, True), printed
    for left in ("left-by-a-fixture-", "left-by-itself-"):
        assert f"AssertionError: shared memory was left behind: descriptor of /dev/shm/{left}" in printed


def test_models_are_tested_without_a_server_and_with_faults_wherever_they_lie(project: Path) -> None:
    (project / "pytest.ini").write_text("[pytest]\ntriton_model_repository = models\n")
    status, printed = outcome_of(
        project,
        """
        import errno
        import os
        import subprocess
        import sys

        import numpy as np
        import pytest

        from shm_backend_utils.client import DeadlineExceededError, PathUnavailableError, ShmClient

        X = np.arange(4, dtype=np.float32)

        def test_by_its_folder(triton_model):
            np.testing.assert_array_equal(triton_model("models/doubled").infer({"X": X})["Y"], X * 2)

        @pytest.mark.parametrize("triton_repository", ["models"])
        def test_in_a_child(triton_model, shm_leak_check):
            harness = triton_model.in_child("doubled")
            with ShmClient(harness) as client, client.infer("doubled", {"X": X}) as result:
                np.testing.assert_array_equal(result["Y"], X * 2)

        def test_a_late_answer(triton_model, triton_repository, faults):
            assert triton_repository.name == "models"
            late = faults.late(triton_model("doubled"), 0)
            with ShmClient(late) as client:
                np.testing.assert_array_equal(client.infer("doubled", {"X": X})["Y"], X * 2)
                late.seconds = 60
                with pytest.raises(DeadlineExceededError):
                    client.infer("doubled", {"X": X}, timeout_s=0.05)

        def test_a_full_tmpfs(triton_model, faults):
            with ShmClient(triton_model("doubled"), path="triton-shm") as client, faults.full_shared_memory():
                with pytest.raises(PathUnavailableError, match="give /dev/shm more room"):
                    client.infer("doubled", {"X": X}, outputs={"Y": 16})

        def test_a_killed_process(faults):
            process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
            faults.kill(process.pid)
            assert process.wait() == -9
            process.stdin.close()

        def test_memory_that_is_taken_away(faults):
            path = f"/dev/shm/faults-{os.getpid()}"
            with open(path, "wb") as file:
                file.write(b"1" * 8192)
            faults.punch_hole(os.path.basename(path), 0, 4096)
            with open(path, "rb") as file:
                assert file.read() == bytes(4096) + b"1" * 4096
            faults.truncate(os.path.basename(path), 10)
            assert os.stat(path).st_size == 10
            os.unlink(path)

        def test_a_call_that_fails(faults):
            with faults.failing("open", errno.EMFILE), pytest.raises(OSError, match="Too many open files"):
                os.open("/dev/null", os.O_RDONLY)

        def test_an_interrupt(faults):
            interrupts = faults.interrupts(__import__("pathlib").Path(subprocess.__file__))
            assert interrupts.at(1, lambda: subprocess.list2cmdline(["a"]))
            assert not interrupts.at(1000, lambda: subprocess.list2cmdline(["a"]))
        """,
    )
    assert (status, "8 passed" in printed) == (0, True), printed


def test_pytest_starts_as_fast_as_without_it() -> None:
    program = "import sys; import shm_backend_utils.testing.plugin; print({'numpy', 'grpc'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, check=True).stdout == b"set()\n"
