"""docs/protocol.md and docs/shm_protocol.h say the same as the code: every table and number.

A C program prints what the compiler makes of the header. The page on plain clients has a descriptor as it is sent; the
examples are sent by tests/e2e/test_protocol_page.py.
"""

from __future__ import annotations

import json
import re
import shutil
import struct
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pytest

from shm_backend_utils import errors
from shm_backend_utils.memory import locks
from shm_backend_utils.memory.managed import KEY_PREFIX
from shm_backend_utils.model.config import Config
from shm_backend_utils.model.triton import _CODES
from shm_backend_utils.model_spec import BATCH_CARRIER, UIDS_PARAMETER
from shm_backend_utils.protocol import claims, handover, layout, parameters, results, spans, table
from shm_backend_utils.protocol.parameters import (
    GENERATION_PARAMETER,
    SLOT_PARAMETER,
    SlotAddress,
    parse_address,
    parse_descriptor,
)

DOCS: Final = Path(__file__).resolve().parents[2] / "docs"
HEADER: Final = (DOCS / "shm_protocol.h").read_text()
FLAGS: Final = ("-Wall", "-Wextra", "-Werror", f"-I{DOCS}")
SEALED_KEY: Final = handover.SealedKey("0" * 32, 1)
FORMATS: Final[Mapping[str, str]] = {
    "shmbu_header": f"{layout._HEADER.format}4x",  # the rest of the first page is zero
    "shmbu_table": table.HEAD.format,
    "shmbu_region": claims._CLAIM.format,
    "shmbu_tensor": table.TENSOR.format,
    "shmbu_results": results._STAMPS.format + results._HEAD.format.removeprefix("<"),
    "shmbu_question": handover._QUESTION.format,
    "shmbu_answer": handover._ANSWER.format,
}
CONSTANTS: Final[Mapping[str, int]] = {
    **{name: getattr(layout, name) for name in ("VERSION", "PAGE_SIZE", "TOKEN_LENGTH", "MAX_SLOT_COUNT")},
    **{name: getattr(spans, name) for name in ("MAX_TENSORS", "MAX_FRAMES", "MAX_FRAMED_GENERATION")},
    **{name: getattr(locks, f"_{name}") for name in ("OWNER_BYTE", "USERS_BYTE", "REAPER_BYTE")},
    **{name: getattr(claims, f"_{name}") for name in ("HANDLE_LENGTH", "NO_FENCE", "FOR_ONE_REQUEST")},
    **{name: getattr(claims, f"_{name}") for name in ("LENT", "CUDA", "NAMED", "CUDA_DESCRIPTOR")},
    "MAX_RECORD_BYTE_SIZE": layout.MAX_RECORD_BYTE_SIZE,
    "MAX_KEY_LENGTH": len(KEY_PREFIX) + 64,
    "SOCKET_LENGTH": len(SEALED_KEY.socket),
    "MAX_REGIONS": claims.MAX_REGIONS,
    "MAX_RANK": table.MAX_RANK,
    "SLOT_BYTE": 0,
    "BORROWED_BYTE": locks._BORROWED,
    "WORKING_BYTE": locks._WORKING,
    **table.NUMBERS,
    "IN_RESPONSE": results._IN_RESPONSE,
    "GIVEN": handover._GIVEN,
    "NOT_GIVEN": handover._REFUSED,
    "MAX_GENERATION": 2**63 - 1,
}
TEXTS: Final[Mapping[str, str]] = {
    "MAGIC": layout._MAGIC.decode(),
    "KEY_PREFIX": KEY_PREFIX,
    "SEALED_KEY_PREFIX": handover._PREFIX,
    "HANDOVER_MAGIC": handover._MAGIC.decode(),
    "SLOT_PARAMETER": SLOT_PARAMETER,
    "GENERATION_PARAMETER": GENERATION_PARAMETER,
    "BATCH_INPUT": BATCH_CARRIER,
}
HELPERS: Final[Mapping[str, int]] = {
    "shmbu_record_offset(3, 8192)": layout.record_offset(3, 8192),
    "shmbu_results_offset(3, 8192)": layout.record_offset(3, 8192) + 4096,
    "shmbu_data_offset(1024, 1 << 20)": layout.data_offset(1024, 1 << 20),
    "shmbu_padded(0)": 0,
    "shmbu_padded(1)": len(claims.padded(b"x")),
    "shmbu_padded(65535)": len(claims.padded(bytes(65535))),
    "shmbu_frame_number(UINT32_MAX, UINT32_MAX - 1)": spans.frame_number(2**32 - 1, 2**32 - 2),
    "shmbu_frame_number(7, 0)": spans.frame_number(7, 0),
}


def fields_of(name: str) -> list[str]:
    body = re.search(rf"struct {name} {{(.*?)}};", HEADER, re.DOTALL)
    assert body is not None
    return re.findall(r"(\w+)(?:\[\w+\])?;", body[1])


def offsets_in(format_text: str) -> list[tuple[int, int]]:
    items = re.findall(r"\d*s|\d*x|[A-Z]", format_text)
    ends = [struct.calcsize("<" + "".join(items[: index + 1])) for index in range(len(items))]
    return list(zip([0, *ends], [end - begin for begin, end in zip([0, *ends], ends, strict=False)], strict=False))


@pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no C compiler")
@pytest.mark.parametrize("standard", ["-std=c99", "-std=gnu17"])
def test_every_number_is_that_of_the_code(tmp_path: Path, standard: str) -> None:
    places = [(name, field) for name in FORMATS for field in fields_of(name)]
    lines = [f'P("%zu", sizeof(struct {name}), "{name}");' for name in FORMATS]
    for name, field in places:
        lines.append(f'P("%zu", offsetof(struct {name}, {field}), "{name}.{field}");')
        lines.append(f'P("%zu", sizeof(((struct {name} *)0)->{field}), "{name}.{field} size");')
    lines += [f'P("%lld", (long long)SHMBU_{name}, "{name}");' for name in CONSTANTS]
    lines += [f'P("%s", SHMBU_{name}, "{name}");' for name in TEXTS]
    lines += [f'P("%llu", (unsigned long long){helper}, "{helper}");' for helper in HELPERS]
    source = "#include <stdio.h>\n#include <shm_protocol.h>\n"
    source += '#define P(form, value, name) printf("%s = " form "\\n", name, value)\n'
    source += "int main(void)\n{\n" + "\n".join(lines) + "\nreturn 0;\n}\n"
    (tmp_path / "program.c").write_text(source)
    program = str(tmp_path / "program")
    subprocess.run(["gcc", *FLAGS, standard, "-o", program, f"{program}.c"], check=True, timeout=60)
    lines = subprocess.run([program], check=True, capture_output=True, text=True, timeout=60).stdout.splitlines()
    told = dict([line.split(" = ") for line in lines])

    expected = {name: str(struct.calcsize(form)) for name, form in FORMATS.items()}
    for name, form in FORMATS.items():
        for field, (offset, size) in zip(fields_of(name), offsets_in(form), strict=True):
            expected |= {f"{name}.{field}": str(offset), f"{name}.{field} size": str(size)}
    expected |= {name: str(value) for name, value in {**CONSTANTS, **HELPERS}.items()} | dict(TEXTS)
    assert told == expected


def test_nothing_in_the_header_is_left_unchecked() -> None:
    defined = set(re.findall(r"^#define SHMBU_(\w+) ", HEADER, re.MULTILINE))
    for members in re.findall(r"^enum(?: \w+)? {(.*?)}", HEADER, re.MULTILINE | re.DOTALL):
        defined |= set(re.findall(r"SHMBU_(\w+) =", members))
    assert defined == {*CONSTANTS, *TEXTS}
    assert set(re.findall(r"^struct (\w+) {", HEADER, re.MULTILINE)) == set(FORMATS)
    assert set(re.findall(r"^static inline uint64_t (\w+)", HEADER, re.MULTILINE)) == {
        helper.partition("(")[0] for helper in HELPERS
    }


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler")
def test_the_header_is_c_plus_plus_too(tmp_path: Path) -> None:
    (tmp_path / "program.cc").write_text("#include <shm_protocol.h>\nint main() { return shmbu_padded(0); }\n")
    command = ["g++", *FLAGS, "-std=c++11", "-o", str(tmp_path / "program"), str(tmp_path / "program.cc")]
    subprocess.run(command, check=True, timeout=60)


DOCUMENT: Final = (DOCS / "protocol.md").read_text()
PROSE: Final = " ".join(re.sub(r"```.*?```", "", DOCUMENT, flags=re.DOTALL).split())
Rows = list[dict[str, str]]
HTTP_STATUS: Final = {
    "INVALID_ARG": ("INVALID_ARGUMENT", "400"),
    "CANCELLED": ("CANCELLED", "400"),
    "ALREADY_EXISTS": ("ALREADY_EXISTS", "400"),
    "NOT_FOUND": ("NOT_FOUND", "404"),
    "INTERNAL": ("INTERNAL", "500"),
    "UNAVAILABLE": ("UNAVAILABLE", "503"),
}
"""What gRPC calls Triton's codes, and what Triton makes of them over HTTP; the end-to-end tests see it."""


def tables() -> list[Rows]:
    """Return every table of the page, each row by its headings; code marks are taken off."""
    found = []
    for text in re.findall(r"(?:^\|.*\n)+", DOCUMENT, re.MULTILINE):
        lines = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in text.splitlines()]
        assert all(len(line) == len(lines[0]) for line in lines), lines[0]
        found.append([dict(zip(lines[0], line, strict=True)) for line in lines[2:]])
    return found


def table_with(*headings: str) -> list[Rows]:
    return [rows for rows in tables() if list(rows[0])[: len(headings)] == list(headings)]


def plain(cell: str) -> str:
    return cell.strip("`")


def test_every_struct_lies_as_its_table_says() -> None:
    letters = {"u8": "B", "u16": "H", "u32": "I", "u64": "Q"}
    # Each table is that of the struct that is named last before it.
    names = re.findall(r"`struct (\w+)`(?:(?!`struct )[\s\S])*?^\| offset \| field \| type \|", DOCUMENT, re.MULTILINE)
    for name, rows in zip(names, table_with("offset", "field", "type"), strict=True):
        form = "<"
        for row in rows:
            assert int(row["offset"]) == struct.calcsize(form), row
            kind = row["type"]
            form += f"{kind.split()[0]}s" if kind.endswith("bytes") else letters[kind]
        assert form == FORMATS[name].removesuffix("4x"), name
    assert sorted(names) == sorted(FORMATS)


def test_every_data_type_has_its_number_and_size() -> None:
    (rows,) = table_with("datatype", "name", "element size")
    told = {int(row["datatype"]): (plain(row["name"]), int(row["element size"])) for row in rows}
    assert told == {number: (dtype.name, dtype.itemsize) for number, dtype in table.BY_NUMBER.items()}


def test_every_refusal_has_its_code_and_status() -> None:
    (rows,) = table_with("code", "gRPC", "HTTP", "when")
    told = {plain(row["code"]): (row["gRPC"], row["HTTP"]) for row in rows}
    expected: dict[str, set[tuple[str, str]]] = {}
    for name in errors.__all__:
        kind = getattr(errors, name)
        code = next((code for base, code in _CODES if issubclass(kind, base)), "INTERNAL")
        expected.setdefault(kind.code, set()).add(HTTP_STATUS[code])
    assert {code: {status} for code, status in told.items()} == expected


SENTENCES: Final = [
    f"1 to {layout.MAX_SLOT_COUNT} |",
    f"a multiple of {layout.PAGE_SIZE}, at most {layout.MAX_RECORD_BYTE_SIZE} |",
    f"inputs and outputs together: at most {spans.MAX_TENSORS} |",
    f"further regions, at most {claims.MAX_REGIONS} |",
    f"of a stream's ring, at most {spans.MAX_FRAMES}; 0 for none |",
    f"of an input, at most {table.MAX_RANK}; of an output 0 |",
    f"`output_count` | u16 | at most {spans.MAX_TENSORS} |",
    f"`event_count` | u16 | at most {claims.MAX_REGIONS} |",
    f"the generation of a stream is at most {spans.MAX_FRAMED_GENERATION}.",
    f"{claims._NO_FENCE} for none |",
    f"kind 2 with fence {claims._NO_FENCE},",
    f"(`flags` {claims._FOR_ONE_REQUEST}) is",
    f"Its fence is not {claims._NO_FENCE}.",
    f"the {claims._HANDLE_LENGTH} bytes of a `CUipcMemHandle`;",
    f"ignores {claims._HANDLE_LENGTH} more bytes, of a `CUipcEventHandle` |",
    f"of CUDA memory {claims._WAITS}, if the client waits",
    f"Write 2^{layout.LOST.bit_length()} - 1 to `completed`",
    f"at most {parameters.MAX_DESCRIPTOR_LENGTH} characters.",
    f"has one more input, `{BATCH_CARRIER}` (",
    f"whom the model's `{UIDS_PARAMETER}` names",
    "`shmbu-`, then 1 to 64 of `0`-`9`, `a`-`z` and `-`. The",
    f"is a zero byte and `{handover._PREFIX}SOCKET`, and no byte behind.",
    f"`magic` | 8 bytes | `{handover._MAGIC.decode()}` |",
    f"`version` | u32 | {layout.VERSION} |",
    f"`status` | u32 | {handover._GIVEN}: one descriptor comes with this; {handover._REFUSED}: none does,",
    f"It waits `SHM_HANDOVER_S` (default: {Config.handover_s:g} s) for all of this.",
    f"{results._BEGIN} bytes, and for each wanted output {table.TENSOR.size}, 8 for each dimension and its padded "
    f"name, and 2 for each event.",
    f"`(generation << {spans._FRAME_BITS}) + n + 1`",
    f"| {locks._OWNER_BYTE} | the client that owns the region, alone |",
    f"| {locks._USERS_BYTE} | models, shared |",
    f"| {locks._REAPER_BYTE} | a process that removes a dead client's region, alone |",
    f"| {claims._LENT} lent | the key of a managed region |",
    f"| {claims._CUDA} CUDA |",
    f"| {claims._NAMED} named |",
    f"| {claims._CUDA_DESCRIPTOR} CUDA by descriptor | the {claims._UUID_LENGTH} bytes of the GPU's UUID, then the key",
]


def test_the_numbers_of_the_page_are_the_codes() -> None:
    assert [sentence for sentence in SENTENCES if sentence not in PROSE] == []
    for offset in (layout.record_offset(0, 4096), rf"{layout.PAGE_SIZE} \+ record_byte_size"):
        assert re.search(rf"^ +{offset} ├", DOCUMENT, re.MULTILINE), "in the drawing"


def test_the_key_of_a_sealed_region_is_as_the_page_says() -> None:
    name = "0123456789abcdef" * 2
    assert "The key** is `shmbu-fd-SOCKET-NUMBER`. SOCKET is 32 random hexadecimal digits" in PROSE
    assert "NUMBER, 1 to 18 decimal digits without zeros in front" in PROSE
    key = handover.parse_sealed_key(f"shmbu-fd-{name}-{'9' * 18}")
    assert key == (name, int("9" * 18))
    assert key.socket_address == b"\0shmbu-fd-" + name.encode()
    assert parse_address(str(SlotAddress("m", str(key), "0" * 32, 0))).key == str(key)
    assert len(str(key)) <= CONSTANTS["MAX_KEY_LENGTH"]
    for wrong in ("0" * 31, "0" * 33, "A" * 32):
        assert handover.parse_sealed_key(str(key._replace(socket=wrong))) is None
    for number in ("", "0", "01", "9" * 19):
        assert handover.parse_sealed_key(f"shmbu-fd-{name}-{number}") is None


def test_the_descriptor_of_named_regions_is_one() -> None:
    (text,) = re.findall(r"```json\n(.*?)```", DOCUMENT, re.DOTALL)
    model, found = parameters.parse_descriptor(text)
    assert model == "resize"
    assert found.inputs["IMAGE"].shape == (8, 480, 640, 3)
    assert json.loads(parameters.encode_descriptor(model, found)) == json.loads(text)
    (rows,) = [rows for rows in table_with("field", "meaning") if rows]
    assert [plain(row["field"]) for row in rows] == list(json.loads(text))


PERF_ANALYZER: Final = (DOCS / "howto" / "plain-clients.md").read_text()


def test_the_descriptor_can_be_sent_as_shown(tmp_path: Path) -> None:
    (text,) = re.findall(r"```json\n(.*?)```", PERF_ANALYZER, re.DOTALL)
    (command,) = re.findall(r"^descriptor=\$\((.*)\)$", PERF_ANALYZER, re.MULTILINE)
    (tmp_path / "descriptor.json").write_text(text)
    shown = subprocess.run(["sh", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert shown.stdout == shown.stdout.lower()
    assert ":" not in shown.stdout
    assert parse_descriptor(shown.stdout) == parse_descriptor(text)
    assert parse_descriptor(text)[1].inputs["INPUT0"].shape == (2, 3, 224, 224)
    sizes = set(re.findall(r"(?:head -c |byte_size\": )(\d+)", PERF_ANALYZER))
    assert sizes == {str(2 * 1204224)}, "the region has room for both tensors"
