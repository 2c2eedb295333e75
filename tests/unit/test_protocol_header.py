"""docs/shm_protocol.h says the same as the protocol's modules: a C program prints what the compiler makes of it."""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pytest

from shm_backend_utils.memory.managed import KEY_PREFIX
from shm_backend_utils.model_spec import BATCH_CARRIER
from shm_backend_utils.protocol import claims, handover, layout, results, spans, table
from shm_backend_utils.protocol.address import GENERATION_PARAMETER, SLOT_PARAMETER

DOCS: Final = Path(__file__).resolve().parents[2] / "docs"
HEADER: Final = (DOCS / "shm_protocol.h").read_text()
COMPILER: Final = shutil.which("gcc")
FLAGS: Final = ("-Wall", "-Wextra", "-Werror", f"-I{DOCS}")

pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no C compiler")

SEALED_KEY: Final = handover.SealedKey("0" * 32, 1)
FORMATS: Final[Mapping[str, str]] = {
    "shmbu_header": f"{layout._HEADER.format}4x",  # the rest of the first page is zero
    "shmbu_table": table._HEAD.format,
    "shmbu_region": claims._CLAIM.format,
    "shmbu_tensor": table.TENSOR.format,
    "shmbu_results": results._STAMPS.format + results._HEAD.format.removeprefix("<"),
    "shmbu_question": handover._QUESTION.format,
    "shmbu_answer": handover._ANSWER.format,
}
CONSTANTS: Final[Mapping[str, int]] = {
    "VERSION": layout.VERSION,
    "PAGE_SIZE": layout.PAGE_SIZE,
    "TOKEN_LENGTH": layout.TOKEN_LENGTH,
    "HANDLE_LENGTH": claims._HANDLE_LENGTH,
    "MAX_SLOT_COUNT": layout.MAX_SLOT_COUNT,
    "MAX_RECORD_BYTE_SIZE": layout.MAX_RECORD_BYTE_SIZE,
    "MAX_KEY_LENGTH": len(KEY_PREFIX) + 64,
    "DESK_LENGTH": len(SEALED_KEY.desk),
    "MAX_TENSORS": spans.MAX_TENSORS,
    "MAX_REGIONS": claims.MAX_REGIONS,
    "MAX_RANK": table.MAX_RANK,
    "MAX_FRAMES": spans.MAX_FRAMES,
    "NO_FENCE": claims._NO_FENCE,
    "OWNER_BYTE": 0,
    "USERS_BYTE": 1,
    "REAPER_BYTE": 2,
    "SLOT_BYTE": 0,
    "BORROWED_BYTE": 1,
    **table.NUMBERS,
    "LENT": claims._LENT,
    "CUDA": claims._CUDA,
    "NAMED": claims._NAMED,
    "FOR_ONE_REQUEST": claims._FOR_ONE_REQUEST,
    "IN_RESPONSE": results._IN_RESPONSE,
    "GIVEN": handover._GIVEN,
    "NOT_GIVEN": handover._REFUSED,
    "MAX_GENERATION": 2**63 - 1,
    "MAX_FRAMED_GENERATION": spans.MAX_FRAMED_GENERATION,
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
    "shmbu_room_since_offset(3, 8192)": layout.record_offset(3, 8192) + 4096 - 8,
    "shmbu_data_offset(1024, 1 << 20)": layout.data_offset(1024, 1 << 20),
    "shmbu_padded(0)": 0,
    "shmbu_padded(1)": len(claims.padded(b"x")),
    "shmbu_padded(65535)": len(claims.padded(bytes(65535))),
    "shmbu_frame_number(UINT32_MAX, UINT32_MAX - 1)": spans.frame_number(2**32 - 1, 2**32 - 2),
    "shmbu_frame_number(7, 0)": spans.frame_number(7, 0),
}


def compiled(source: str, folder: Path, *flags: str) -> dict[str, str]:
    """Compile and run a C program that prints names and values, and return them."""
    assert COMPILER is not None
    program = folder / "program"
    (folder / "program.c").write_text(source)
    subprocess.run([COMPILER, *FLAGS, *flags, "-o", program, folder / "program.c"], check=True, timeout=60)
    lines = subprocess.run([program], check=True, capture_output=True, text=True, timeout=60).stdout.splitlines()
    return dict([line.split(" = ") for line in lines])


def fields_of(name: str) -> list[str]:
    """Return the fields of a struct of the header, in their order."""
    body = re.search(rf"struct {name} {{(.*?)}};", HEADER, re.DOTALL)
    assert body is not None
    return re.findall(r"(\w+)(?:\[\w+\])?;", body[1])


def offsets_in(format_text: str) -> list[tuple[int, int]]:
    """Return offset and size of each item of a struct's format."""
    items = re.findall(r"\d*s|\d*x|[A-Z]", format_text)
    ends = [struct.calcsize("<" + "".join(items[: index + 1])) for index in range(len(items))]
    return list(zip([0, *ends], [end - begin for begin, end in zip([0, *ends], ends, strict=False)], strict=False))


@pytest.mark.parametrize("standard", ["-std=c99", "-std=c11", "-std=gnu17"])
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
    told = compiled(source, tmp_path, standard)

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


def test_the_key_of_a_sealed_region_has_its_lengths() -> None:
    assert handover.parse_sealed_key(str(SEALED_KEY)) == SEALED_KEY
    for desk in ("0" * 31, "0" * 33, "A" * 32):
        assert handover.parse_sealed_key(str(SEALED_KEY._replace(desk=desk))) is None
    assert len(str(SEALED_KEY._replace(number=10**18 - 1))) <= CONSTANTS["MAX_KEY_LENGTH"]


def test_every_field_is_asserted_in_the_header_itself() -> None:
    for name in FORMATS:
        asserted = re.findall(rf"SHMBU_AT\({name}, (\w+), \d+\);", HEADER)
        assert asserted == [field for field in fields_of(name) if (name, field) != ("shmbu_header", "reserved")]
        assert f"SHMBU_SIZE({name}, {struct.calcsize(FORMATS[name])});" in HEADER


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler")
def test_the_header_is_c_plus_plus_too(tmp_path: Path) -> None:
    (tmp_path / "program.cc").write_text("#include <shm_protocol.h>\nint main() { return shmbu_padded(0); }\n")
    command = ["g++", *FLAGS, "-std=c++11", "-o", str(tmp_path / "program"), str(tmp_path / "program.cc")]
    subprocess.run(command, check=True, timeout=60)
