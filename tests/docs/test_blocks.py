"""Each block of code in a page is what it says it is, and is run, or it is said why not."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from .commands import complaints
from .documents import PAGES, ROOT, Block, blocks, name_of

BLOCKS: Final = [block for page in PAGES for block in blocks(page)]


def read_shell(code: str) -> None:
    found = complaints(code)
    assert not found, "; ".join(found)


def read_session(code: str) -> None:
    """Look at what was typed in a terminal: the lines with a prompt, and not what they print."""
    read_shell("".join(line[2:] for line in code.splitlines(keepends=True) if line.startswith("$ ")))


def read_configuration(code: str) -> None:
    text_format.Parse(code, model_config_pb2.ModelConfig())


def read_dockerfile(code: str) -> None:
    instructions = [line.split()[0] for line in code.replace("\\\n", "").splitlines() if line and line[0] != "#"]
    assert instructions[0] in ("FROM", "ARG")


READ: Final[dict[str, Callable[[str], Any]]] = {
    "python": ast.parse,
    "sh": read_shell,
    "console": read_session,
    "protobuf": read_configuration,
    "json": json.loads,
    "yaml": lambda code: list(yaml.safe_load_all(code)),
    "promql": str,  # tests/unit/test_metrics.py looks at queries
    "dockerfile": read_dockerfile,
    "text": str,
}
BY_A_TEST_ALONE: Final = ("http", "hex", "c", "promql")
"""What only a test of the page's own can read."""


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_block_can_be_read_as_what_it_is_written_in(block: Block) -> None:
    assert block.language in {*READ, *BY_A_TEST_ALONE}, f"{block}: a block in {block.language or 'no language'}"
    if block.language in READ:
        READ[block.language](block.code)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_what_is_not_run_here_is_run_elsewhere_or_has_a_reason(page: Path) -> None:
    for block in blocks(page):
        if block.mark == "run by":
            assert (ROOT / block.said).is_file(), block
        elif block.mark is None:
            assert block.language not in BY_A_TEST_ALONE, f"{block}: which test runs it?"
        elif block.mark != "prints":
            assert block.said, block


def test_there_are_blocks_of_most_kinds() -> None:
    """Nothing is found to be right because nothing is found."""
    assert {block.language for block in BLOCKS} >= {"python", "sh", "protobuf", "json", "text"}
    assert {block.mark for block in BLOCKS} == {None, "file", "program", "prints", "run by", "not run"}
