"""The descriptor that docs/perf_analyzer.md has one write, sent as it says, is one."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from shm_backend_utils.protocol.named import parse_descriptor

DOCUMENT = (Path(__file__).resolve().parents[2] / "docs" / "perf_analyzer.md").read_text()


def test_the_descriptor_can_be_sent_as_shown(tmp_path: Path) -> None:
    (text,) = re.findall(r"```json\n(.*?)```", DOCUMENT, re.DOTALL)
    (command,) = re.findall(r"^descriptor=\$\((.*)\)$", DOCUMENT, re.MULTILINE)
    (tmp_path / "descriptor.json").write_text(text)
    shown = subprocess.run(["sh", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert shown.stdout == shown.stdout.lower()
    assert ":" not in shown.stdout
    assert parse_descriptor(shown.stdout) == parse_descriptor(text)
    assert parse_descriptor(text)[1].inputs["INPUT0"].shape == (2, 3, 224, 224)


def test_the_region_has_room_for_both_tensors() -> None:
    sizes = set(re.findall(r"(?:head -c |byte_size\": )(\d+)", DOCUMENT))
    assert sizes == {str(2 * 1204224)}
