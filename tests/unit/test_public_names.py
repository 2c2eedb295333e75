"""What the package itself offers: shown to people, and loaded when it is asked for. Its types: tests/typing."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest

import shm_backend_utils

HALVES = ("client", "model", "errors", "tensors.view")


def test_a_public_name_is_the_same_wherever_it_is_to_be_had() -> None:
    for name in {*shm_backend_utils.__all__} - {"__version__"}:
        known = getattr(shm_backend_utils, name)
        homes = [vars(import_module(f"shm_backend_utils.{half}")).get(name) for half in HALVES]
        assert {id(each) for each in homes if each is not None} == {id(known)}, name


@pytest.mark.parametrize("name", ["", ".client", ".model"])
def test_what_is_shown_is_what_is_public(name: str) -> None:
    module = import_module(f"shm_backend_utils{name}")
    assert dir(module) == sorted(module.__all__)


@pytest.mark.parametrize("half", ["client", "model", "errors"])
def test_every_public_name_of_a_half_is_there(half: str) -> None:
    module = import_module(f"shm_backend_utils.{half}")
    assert [name for name in module.__all__ if not hasattr(module, name)] == []
    assert sorted(set(module.__all__)) == sorted(module.__all__)


def test_names_of_the_model_half_need_no_client() -> None:
    names = "ShmError, ShmSession, Call, TensorView"
    program = f"import sys; sys.modules['tritonclient'] = None; from shm_backend_utils import {names}"
    subprocess.run([sys.executable, "-c", program], check=True)
