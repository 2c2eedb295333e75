"""The stubs and the modules in the running stub process have the same names and signatures, no more and no less."""

from __future__ import annotations

import pytest

from shm_backend_utils.client import ShmClient
from shm_backend_utils.server import EmbeddedServer

from .declared import MODULES, Declaration, declarations
from .described import Described, Signature
from .releases import release_of, releases_of_parameters
from .reported import Report, report_of


@pytest.fixture(scope="module")
def report(triton_server: EmbeddedServer) -> Report:
    with ShmClient(triton_server.grpc_url, timeout_s=60) as client:
        return report_of(client)


@pytest.mark.parametrize("module", MODULES)
def test_the_names_are_those_of_the_running_server(module: str, report: Report) -> None:
    declared = declarations(module)
    there = {name for name in declared if release_of(name, declared) <= report.version}
    assert sorted(report.names[module]) == sorted(there)


@pytest.mark.parametrize("module", MODULES)
def test_kinds_signatures_and_values_are_those_of_the_running_server(module: str, report: Report) -> None:
    declared = declarations(module)
    reported = {name: described for name, described in report.names[module].items() if name in declared}
    expected = {name: as_far_as_told(expected_of(name, declared, report), reported[name]) for name in reported}
    assert {name: (expected[name], told) for name, told in reported.items() if expected[name] != told} == {}
    assert len([told for told in reported.values() if told.signature is not None]) > 10


def expected_of(name: str, declared: dict[str, Declaration], report: Report) -> Described:
    """Return what the stub says of a name, for the server that runs."""
    described = declared[name].described
    if described.signature is None:
        return described
    releases = releases_of_parameters(name, declared)
    parameters = [
        parameter
        for parameter in described.signature.parameters
        if parameter.name is None or releases.get(parameter.name, report.version) <= report.version
    ]
    return described._replace(signature=described.signature._replace(parameters=tuple(parameters)))


def as_far_as_told(expected: Described, told: Described) -> Described:
    """Return it without the types and values that the running module says nothing of."""
    if told.value is None:
        expected = expected._replace(value=None)
    if expected.signature is None or told.signature is None:
        return expected
    types = [parameter.type for parameter in told.signature.parameters]
    types += [None] * len(expected.signature.parameters)
    parameters = [
        parameter._replace(type=parameter.type if type_ is not None else None)
        for parameter, type_ in zip(expected.signature.parameters, types, strict=False)
    ]
    returns = expected.signature.returns if told.signature.returns is not None else None
    return expected._replace(signature=Signature(tuple(parameters), returns))


def test_what_is_compiled_comes_after_model_py_was_imported(report: Report) -> None:
    ours, compiled = (declarations(f"{half}python_backend_utils") for half in ("triton_", "c_"))
    from_the_start = {name for name in ours if "." not in name and name not in compiled} - {"get_model_dir"}
    assert sorted(report.names_at_import["triton_python_backend_utils"]) == sorted(
        name for name in from_the_start if release_of(name, ours) <= report.version
    )
    assert "InferenceResponseSender" in report.names_at_import["c_python_backend_utils"]
