"""A plugin of pytest that writes down which lines of the library each test executes, and how long it takes."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Generator
from pathlib import Path
from typing import Final

import coverage
import pytest

OUTPUT: Final = "SHM_MUTANTS_OUTPUT"
"""The environment variable that names the file to write."""


class Recorder:
    """Writes ``{"tests": {test: {"seconds": float, "lines": {file: [line]}}}, "failed": [test or file]}``."""

    def __init__(self, root: Path, output: Path) -> None:
        self._root = root
        self._output = output
        self._seconds: dict[str, float] = {}
        self._passed: set[str] = set()
        self._failed: set[str] = set()
        self._coverage = coverage.Coverage(
            data_file=None, config_file=False, source=[str(root / "shm_backend_utils")], messages=False
        )
        self._coverage.start()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self._coverage.switch_context(item.nodeid)
        begin = time.perf_counter()
        try:
            return (yield)
        finally:
            self._seconds[item.nodeid] = time.perf_counter() - begin
            self._coverage.switch_context("")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed.add(report.nodeid)
        elif report.passed and report.when == "call":
            self._passed.add(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._failed.add(report.nodeid)

    def pytest_unconfigure(self) -> None:
        self._coverage.stop()
        data = self._coverage.get_data()
        lines: dict[str, dict[str, list[int]]] = {}
        for path in data.measured_files():
            file = str(Path(path).relative_to(self._root))
            for line, tests in data.contexts_by_lineno(path).items():
                for test in tests:
                    lines.setdefault(test, {}).setdefault(file, []).append(line)
        passed = {
            test: {"seconds": self._seconds[test], "lines": lines.get(test, {})}
            for test in sorted(self._passed - self._failed)
        }
        self._output.write_text(json.dumps({"tests": passed, "failed": sorted(self._failed)}))


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Recorder(config.rootpath, Path(os.environ[OUTPUT])))
