"""Every table, number and example of docs/protocol.md agrees with the code."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Final

import pytest

from shm_backend_utils import dtypes, errors
from shm_backend_utils.memory import locks
from shm_backend_utils.model.config import Config
from shm_backend_utils.model.triton import _CODES
from shm_backend_utils.model_spec import BATCH_CARRIER, UIDS_PARAMETER
from shm_backend_utils.protocol import claims, handover, layout, named, results, spans, table
from shm_backend_utils.protocol.address import (
    GENERATION_PARAMETER,
    SLOT_PARAMETER,
    SlotAddress,
    parse_address,
    parse_generation,
)
from shm_backend_utils.protocol.refusals import code_in
from shm_backend_utils.protocol.results import OutputPlace, Results
from shm_backend_utils.protocol.spans import InputSpan, OutputSpan, Table

DOCUMENT: Final = (Path(__file__).resolve().parents[2] / "docs" / "protocol.md").read_text()
PROSE: Final = " ".join(re.sub(r"```.*?```", "", DOCUMENT, flags=re.DOTALL).split())

Rows = list[dict[str, str]]

FP32: Final = dtypes.BY_NAME["FP32"]
ADDRESS: Final = SlotAddress("identity", "shmbu-4711-0123456789abcdef", "00112233445566778899aabbccddeeff", 0)
TABLE: Final = Table({"INPUT0": InputSpan(FP32, (4,), 0, 8192, 16)}, {"OUTPUT0": OutputSpan(0, 8448, 16)})
RESULTS: Final = Results((OutputPlace("OUTPUT0", FP32, (4,), 0, 8192, 16, False),), ())
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


def examples(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", DOCUMENT, re.DOTALL)


def message(text: str) -> tuple[list[str], str]:
    """Return an HTTP message's head and body; the body is one line on the wire."""
    head, _, body = text.partition("\n\n")
    return head.splitlines(), body.replace("\n", "")


STRUCTS: Final = {
    "shmbu_header": layout._HEADER,
    "shmbu_question": handover._QUESTION,
    "shmbu_answer": handover._ANSWER,
    "shmbu_table": table._HEAD,
    "shmbu_tensor": table.TENSOR,
    "shmbu_results": struct.Struct(results._STAMPS.format + results._HEAD.format.removeprefix("<")),
    "shmbu_region": claims._CLAIM,
}


def tables_of_structs() -> dict[str, Rows]:
    """Return the tables of fields, by the struct that is named last before each."""
    names = re.findall(r"`struct (\w+)`(?:(?!`struct )[\s\S])*?^\| offset \| field \| type \|", DOCUMENT, re.MULTILINE)
    return dict(zip(names, table_with("offset", "field", "type"), strict=True))


@pytest.mark.parametrize("name", STRUCTS)
def test_a_struct_lies_as_its_table_says(name: str) -> None:
    form = "<"
    for row in tables_of_structs()[name]:
        assert int(row["offset"]) == struct.calcsize(form), row
        kind = row["type"]
        form += (
            f"{kind.split()[0]}s" if kind.endswith("bytes") else {"u8": "B", "u16": "H", "u32": "I", "u64": "Q"}[kind]
        )
    assert struct.calcsize(form) == STRUCTS[name].size
    assert form == STRUCTS[name].format


def test_every_struct_of_the_page_is_compared() -> None:
    assert list(tables_of_structs()) == list(STRUCTS)


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


def test_the_parameters_are_the_codes() -> None:
    (rows,) = table_with("parameter", "type", "value")
    assert [plain(row["parameter"]) for row in rows] == [SLOT_PARAMETER, GENERATION_PARAMETER]
    assert plain(rows[0]["value"]) == f"{layout.VERSION}/MODEL/KEY/TOKEN/SLOT"
    assert rows[1]["value"].endswith("1 to 2^63 - 1")


def test_the_locked_bytes_are_the_codes() -> None:
    (rows,) = table_with("byte", "held by", "while")
    assert [row["byte"] for row in rows] == [
        str(locks._OWNER_BYTE),
        str(locks._USERS_BYTE),
        str(locks._REAPER_BYTE),
        "the first of a slot's record",
        "the second of a slot's record",
        "both",
    ]
    assert locks._BORROWED == 1


def test_the_kinds_of_regions_are_the_codes() -> None:
    (rows,) = table_with("kind", "name", "offsets count from")
    assert [row["kind"] for row in rows] == [
        f"{claims._LENT} lent",
        f"{claims._CUDA} CUDA",
        f"{claims._NAMED} named",
    ]


@pytest.mark.parametrize(
    "sentence",
    [
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
        f"the {claims._HANDLE_LENGTH} bytes of a `CUipcEventHandle` |",
        f"at most {named.MAX_DESCRIPTOR_LENGTH} characters.",
        f"has one more input, `{BATCH_CARRIER}` (",
        f"whom the model's `{UIDS_PARAMETER}` names",
        "`shmbu-`, then 1 to 64 of `0`-`9`, `a`-`z` and `-`. What",
        f"is a zero byte and `{handover._PREFIX}DESK`, and no byte behind.",
        f"`magic` | 8 bytes | `{handover._MAGIC.decode()}` |",
        f"`version` | u32 | {layout.VERSION} |",
        f"`status` | u32 | {handover._GIVEN}: one descriptor comes with this; {handover._REFUSED}: none does,",
        f"It waits `SHM_HANDOVER_S` (default: {Config.handover_s:g} s) for all of this.",
        f"{results._BEGIN} bytes, and for each wanted output {table.TENSOR.size}, 8 for each dimension and its padded "
        f"name, and 2 for each event.",
        f"`(generation << {spans._FRAME_BITS}) + n + 1`",
    ],
)
def test_a_number_of_the_page_is_the_codes(sentence: str) -> None:
    assert sentence in PROSE


def test_the_key_is_as_long_as_the_page_says() -> None:
    address = ADDRESS._replace(key="shmbu-" + "a" * 64)
    assert parse_address(str(address)) == address
    with pytest.raises(errors.TableError):
        parse_address(str(address._replace(key=address.key + "a")))
    with pytest.raises(errors.TableError):
        parse_generation(0)


def test_the_key_of_a_sealed_region_is_as_the_page_says() -> None:
    desk = "0123456789abcdef" * 2
    assert "The key** is `shmbu-fd-DESK-NUMBER`. DESK is 32 random hexadecimal digits" in PROSE
    assert "NUMBER, 1 to 18 decimal digits without zeros in front" in PROSE
    key = handover.parse_sealed_key(f"shmbu-fd-{desk}-{'9' * 18}")
    assert key == (desk, int("9" * 18))
    assert key.socket_address == b"\0shmbu-fd-" + desk.encode()
    assert parse_address(str(ADDRESS._replace(key=str(key)))).key == str(key)
    for number in ("", "0", "01", "9" * 19):
        assert handover.parse_sealed_key(f"shmbu-fd-{desk}-{number}") is None


def test_the_drawing_shows_the_layout() -> None:
    assert re.search(rf"^ +{layout.record_offset(0, 4096)} ├", DOCUMENT, re.MULTILINE)
    assert re.search(rf"^ +{layout.PAGE_SIZE} \+ record_byte_size ├", DOCUMENT, re.MULTILINE)


def test_the_table_in_hexadecimal_is_one() -> None:
    data = bytes.fromhex(examples("hex")[0])
    assert table.decode(data, layout.data_offset(1, 4096), 12288) == (7, TABLE)
    assert data == (7).to_bytes(8, "little") + table.encode(TABLE)


def test_the_results_in_hexadecimal_are_some() -> None:
    data = bytes.fromhex(examples("hex")[1])
    assert results.decode(data, [12288]) == RESULTS._replace(completed=7)
    assert data[16:] == results.encode(RESULTS.outputs)


def test_every_http_message_is_as_long_as_it_says() -> None:
    for text in examples("http"):
        head, body = message(text)
        assert f"Content-Length: {len(body)}" in head
        json.loads(body)


def test_the_requests_name_a_slot() -> None:
    requests = [message(text) for text in examples("http") if text.startswith("POST")]
    for head, body in requests:
        sent = json.loads(body)
        address = parse_address(sent["parameters"][SLOT_PARAMETER])
        assert head[0] == f"POST /v2/models/{address.model}/infer HTTP/1.1"
        assert address == ADDRESS._replace(model=address.model)
        assert parse_generation(sent["parameters"][GENERATION_PARAMETER]) == 7
    plain_one, batch = [json.loads(body)["inputs"] for _, body in requests]
    assert plain_one == []
    assert batch == [{"name": BATCH_CARRIER, "shape": [2, 0], "datatype": "UINT8", "data": []}]


def test_the_refusal_has_a_code_of_the_page() -> None:
    (body,) = [message(text)[1] for text in examples("http") if " 400 " in text]
    assert code_in(json.loads(body)["error"]) == "shm:stale"


def test_the_descriptor_of_named_regions_is_one() -> None:
    (text,) = examples("json")
    model, found = named.parse_descriptor(text)
    assert model == "resize"
    assert found.inputs["IMAGE"].shape == (8, 480, 640, 3)
    assert json.loads(named.encode_descriptor(model, found)) == json.loads(text)
    (rows,) = [rows for rows in table_with("field", "meaning") if rows]
    assert [plain(row["field"]) for row in rows] == list(json.loads(text))
