"""Run perf_analyzer for one case on each of three ways, and read what it has measured."""

from __future__ import annotations

import base64
import csv
import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from shm_backend_utils.errors import MachineError
from shm_backend_utils.memory.shared_file import DEV_SHM

from .cases import Case
from .install import PerfAnalyzer
from .region import Region

__all__ = ["Figures", "PerfAnalyzerError", "Runs", "own_names"]

# It gives no figures at all unless three windows in a row agree so well, which on a busy machine they do not.
_ANY_STABILITY: Final = "999"
_NO_BYTES: Final = {"content": [], "shape": [0]}
_ONE_BYTE: Final = [0]


class PerfAnalyzerError(Exception):
    """perf_analyzer did not measure what it should."""


@dataclass(frozen=True)
class Figures:
    """What perf_analyzer says of one run. Each row of a batch is an inference."""

    inferences_per_s: float
    p50_ms: float
    p90_ms: float
    p99_ms: float


class Runs:
    """How perf_analyzer is run.

    Parameters
    ----------
    analyzer : PerfAnalyzer
    url : str
        The server's gRPC address.
    window_ms : int
        How long each of the three windows lasts that it measures in.
    concurrency : int
        How many requests are on their way at any time.
    scratch : pathlib.Path
        A folder for files that it reads and writes.
    """

    def __init__(self, analyzer: PerfAnalyzer, url: str, window_ms: int, concurrency: int, scratch: Path) -> None:
        self._analyzer = analyzer
        self._url = url
        self._window_ms = window_ms
        self._concurrency = concurrency
        self._scratch = scratch

    def in_band(self, case: Case) -> Figures:
        """Send the input, and get the output, in messages."""
        return self._run(case, {case.input_name: _content(case)}, _shape(case))

    def system(self, case: Case, output_size: int) -> Figures:
        """Let perf_analyzer share memory with the server, as Triton does it by itself.

        It unregisters every region that the server knows, its own or not.
        """
        data: dict[str, Any] = {case.input_name: _content(case)}
        options = [*_shape(case), "--shared-memory", "system", "--output-shared-memory-size", str(output_size)]
        if case.batch_size:  # it leaves no input out that lies in shared memory, and registers no region without bytes
            data["SHM"] = _ONE_BYTE
            options += ["--shape", "SHM:1"]
        with own_names(case):
            return self._run(case, data, options)

    def direct(self, case: Case, region: Region) -> Figures:
        """Name memory that is prepared, in a request without tensors.

        Raises
        ------
        PerfAnalyzerError
            It gave no figures, or the output was not there afterwards.
        """
        region.clear_output()
        data = {"SHM": _NO_BYTES} if case.batch_size else {}
        figures = self._run(case, data, ["--request-parameter", f"shm_io:{region.descriptor}:string"])
        if not region.has_expected_output():
            raise PerfAnalyzerError(
                f"model {case.model!r} on the direct path: found other bytes in the region than those that it answers "
                "in band, expected the same; the figures mean nothing"
            )
        return figures

    def _run(self, case: Case, data: dict[str, Any], options: list[str]) -> Figures:
        data_file, figures_file = self._scratch / "data.json", self._scratch / "figures.csv"
        data_file.write_text(json.dumps({"data": [data]}))
        figures_file.unlink(missing_ok=True)
        command = [str(self._analyzer.binary), "-m", case.model, "-b", str(case.batch_size or 1)]
        command += ["-u", self._url, "-i", "grpc", "--concurrency-range", str(self._concurrency)]
        command += ["--measurement-mode", "time_windows", "--measurement-interval", str(self._window_ms)]
        command += ["--stability-percentage", _ANY_STABILITY, "--input-data", str(data_file), "-f", str(figures_file)]
        result = subprocess.run(
            [*command, *options],
            env=self._analyzer.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # a Ctrl-C in the terminal is this program's to handle
            check=False,
        )
        if result.returncode != 0 or not figures_file.is_file():
            raise PerfAnalyzerError(
                f"perf_analyzer for model {case.model!r}: found status {result.returncode}, expected figures: "
                f"{_complaint(result.stdout)}"
            )
        return _figures(figures_file)


@contextmanager
def own_names(case: Case, folder: Path = DEV_SHM) -> Iterator[None]:
    """Keep perf_analyzer's names in shared memory from being anybody else's, and from staying behind.

    It calls its regions by the names of the tensors alone, would write into whatever has such a name already, and
    leaves them if it is killed.

    Raises
    ------
    MachineError
        One of the names is in use.
    """
    names = [f"{case.input_name}_0_0", case.output_name, *(["SHM_0_0"] if case.batch_size else [])]
    regions = [folder / name for name in names]
    for region in regions:
        if region.exists():
            raise MachineError(
                f"{region} exists, but perf_analyzer would write there: wait for another perf_analyzer to end, or "
                "remove what a killed one has left"
            )
    try:
        yield
    finally:
        for region in regions:
            region.unlink(missing_ok=True)


def _content(case: Case) -> dict[str, str]:
    return {"b64": base64.b64encode(case.row().tobytes()).decode()}


def _shape(case: Case) -> list[str]:
    return ["--shape", f"{case.input_name}:{','.join(map(str, case.row_shape))}"]


def _complaint(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line.lower()), lines[-1] if lines else "it said nothing")


def _figures(file: Path) -> Figures:
    with file.open(newline="") as opened:
        row = next(csv.DictReader(opened))
    latencies = [float(row[f"p{percent} latency"]) / 1000 for percent in (50, 90, 99)]
    return Figures(float(row["Inferences/Second"]), *latencies)
