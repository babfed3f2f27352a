"""The C side of `wire.layout` says the same as its Python side, and both match a record."""

import re
import struct
from itertools import product
from pathlib import Path

import pytest

from penstock.store.consumequeue.consumequeue import unpack_entry
from penstock.wire import codes, layout
from tests.unit.wire.probe_kit import compile_probe
from tests.unit.wire.records import PLAIN, encoded

CONSTANTS = {name: value for name, value in vars(layout).items() if name.isupper()}
FUNCTIONS = [name for name, value in vars(layout).items() if getattr(value, "__code__", None)]
ARGUMENTS = (0, layout.BORN_HOST_V6, layout.STORE_HOST_V6, 0x30, layout.MAGIC_V1, layout.MAGIC_V2)


def test_python_and_c_have_the_same_names() -> None:
    declared = Path(layout.__file__).with_suffix(".pxd").read_text()
    assert re.findall(r"^    ([A-Z0-9_]+) = ", declared, re.M) == list(CONSTANTS)
    assert re.findall(r"^cdef inline int (\w+)\(", declared, re.M) == FUNCTIONS


@pytest.mark.slow
def test_python_and_c_have_the_same_values(tmp_path: Path) -> None:
    values = ", ".join(f"{name!r}: layout.{name}" for name in CONSTANTS)
    source = f"from penstock.wire import layout\n\ndef constants():\n    return {{{values}}}\n"
    types = "from penstock.wire cimport layout\n"
    for name in FUNCTIONS:
        source += f"\ndef {name}(value):\n    return layout.{name}(value)\n"
        types += f"cpdef int {name}(int value)\n"
    probe = compile_probe(tmp_path, "layout_probe", source, types)
    assert probe.constants() == CONSTANTS
    for name, value in product(FUNCTIONS, ARGUMENTS):
        assert getattr(probe, name)(value) == getattr(layout, name)(value), (name, value)


@pytest.mark.parametrize("born", [8, 20])
@pytest.mark.parametrize("store", [8, 20])
def test_a_record_has_its_fields_at_the_offsets_of_the_layout(born: int, store: int) -> None:
    message = {**PLAIN, "born_host": b"b" * born, "store_host": b"s" * store}
    data = encoded(message)

    def number(kind: str, at: int) -> int:
        return int(struct.unpack_from(f">{kind}", data, at)[0])

    sys_flag = number("i", layout.SYS_FLAG_AT)
    body_at = layout.body_at(sys_flag)
    assert number("i", layout.SIZE_AT) == len(data)
    assert number("i", layout.QUEUE_ID_AT) == message["queue_id"]
    assert number("i", layout.FLAG_AT) == message["flag"]
    assert number("q", layout.QUEUE_OFFSET_AT) == message["queue_offset"]
    assert number("q", layout.PHYSICAL_OFFSET_AT) == message["physical_offset"]
    assert number("q", layout.BORN_MS_AT) == message["born_ms"]
    assert number("q", layout.store_ms_at(sys_flag)) == message["store_ms"]
    assert data[layout.BORN_HOST_AT :].startswith(message["born_host"])
    assert data[layout.store_host_at(sys_flag) :].startswith(message["store_host"])
    assert layout.born_host_length(sys_flag) == born
    assert layout.store_host_length(sys_flag) == store
    assert number("i", body_at - layout.RECONSUME_TIMES_BEFORE_BODY) == message["reconsume_times"]
    assert number("q", body_at - layout.PREPARED_OFFSET_BEFORE_BODY) == message["prepared_offset"]
    assert number("i", body_at - layout.BODY_LENGTH_BEFORE_BODY) == len(message["body"])
    assert data[body_at:].startswith(message["body"])


def test_system_flag_bits_equal_those_of_the_codes() -> None:
    assert codes.SYS_BORN_HOST_V6 == layout.BORN_HOST_V6
    assert codes.SYS_STORE_HOST_V6 == layout.STORE_HOST_V6


def test_a_queue_entry_is_unpacked_by_the_layout() -> None:
    data = bytearray(layout.ENTRY_BYTES)
    struct.pack_into(">q", data, layout.ENTRY_OFFSET_AT, 1)
    struct.pack_into(">i", data, layout.ENTRY_SIZE_AT, 2)
    struct.pack_into(">q", data, layout.ENTRY_TAG_AT, 3)
    assert unpack_entry(data) == (1, 2, 3)
    assert unpack_entry(data[:-1]) is None
