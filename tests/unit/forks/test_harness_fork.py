"""A harness in a forked child, which leaves its parent's models alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.forks.programs import ENDINGS, run_program
from tests.unit.harness.folders import folder_of

CODE = """
    import os
    import pathlib
    import triton_python_backend_utils as pb_utils
    FINALIZED = pathlib.Path(__file__).with_name("finalized")
    class TritonPythonModel:
        def execute(self, requests):
            return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", requests[0].inputs()[0].as_numpy())])]
        def finalize(self):
            FINALIZED.write_text(FINALIZED.read_text() + "once " if FINALIZED.exists() else "once ")
"""
PROGRAM = """
import numpy as np
from pathlib import Path
from shm_backend_utils.client import ForkedError, ShmClient
from shm_backend_utils.testing.harness import ModelHarness

X = {{"X": np.arange(4, dtype=np.float32)}}
folder = Path({folder!r})
finalized = folder / "1" / "finalized"

def sockets():
    return {{os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()}}

def check():
    assert (harness.infer(X)["Y"] == X["X"]).all()
    with client.infer("m", X) as result:
        assert (result["Y"] == X["X"]).all()

def close():
    if {make!r} == "ModelHarness.in_child" and connection in sockets():
        os._exit(2)
    for use in (lambda: harness.infer(X), lambda: ShmClient(harness)):
        try:
            use()
        except ForkedError as error:
            assert "this ModelHarness was made by another process" in str(error)
        else:
            os._exit(3)
    client.close()
    harness.close()

with {make}(folder) as harness, ShmClient(harness) as client:
    check()
    if {make!r} == "ModelHarness.in_child":
        connection = os.readlink(f"/proc/self/fd/{{harness._open().model('m').instances[0]._connection.fileno()}}")
    in_child(close)
    in_child(lambda: None)
    assert not finalized.exists()
    check()
assert finalized.read_text() == "once "
"""


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("make", ["ModelHarness", "ModelHarness.in_child"])
def test_a_forked_child_leaves_its_parents_models_alone(tmp_path: Path, make: str, ending: str) -> None:
    run_program(ending, PROGRAM.format(folder=str(folder_of(tmp_path, CODE)), make=make))
