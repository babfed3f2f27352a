"""Where the fields of records, queue entries and index files lie. All numbers are big-endian.

The message record, in the log, on the wire and in replication:

    size i32 | magic i32 | body CRC i32 | queue id i32 | flag i32 | queue offset i64
    | physical offset i64 | system flag i32 | born time i64 | born host 8 or 20
    | store time i64 | store host 8 or 20 | reconsume times i32 | prepared offset i64
    | body length i32, body | topic length i8 (V1) or i16 (V2), topic | properties length i16, text

One message of a batch body:

    size i32 | magic i32 | CRC i32 | flag i32 | body length i32, body | properties length i16, text

A ConsumeQueue entry:

    physical offset i64 | record size i32 | tag hash i64

An index file: the header, the slots (the number of each slot's newest entry, i32), the entries:

    begin time i64 | end time i64 | begin offset i64 | end offset i64 | slots used i32
    | next entry number i32
    key hash i32 | physical offset i64 | seconds since begin time i32 | previous entry i32

`layout.pxd` gives compiled modules the same names as C constants and inline functions. This module
itself is never compiled.
"""

from typing import Final

# --- the record ----------------------------------------------------------------------------------

SIZE_AT: Final = 0
MAGIC_AT: Final = 4
BODY_CRC_AT: Final = 8
QUEUE_ID_AT: Final = 12
FLAG_AT: Final = 16
QUEUE_OFFSET_AT: Final = 20
PHYSICAL_OFFSET_AT: Final = 28
SYS_FLAG_AT: Final = 36
BORN_MS_AT: Final = 40
BORN_HOST_AT: Final = 48

# Behind the hosts, whose lengths vary, fields are found from the first byte of the body.
RECONSUME_TIMES_BEFORE_BODY: Final = 16
PREPARED_OFFSET_BEFORE_BODY: Final = 12
BODY_LENGTH_BEFORE_BODY: Final = 4

HEAD_BYTES: Final = 8
"""Size and magic: enough to know what lies at a position of the log."""
FIXED_BYTES: Final = 91
"""A V1 record with two IPv4 hosts, without body, topic and properties: the shortest record."""
PROPERTIES_LENGTH_BYTES: Final = 2

MAGIC_V1: Final = -626843481  # 0xDAA320A7
MAGIC_V2: Final = -626843477  # 0xDAA320AB: the topic's length has two bytes
MAGIC_BLANK: Final = -875286124  # 0xCBD43194: the rest of a segment is unused
BLANK_BYTES: Final = 8
"""A segment ends with at least this much: size and magic of the blank record."""

BORN_HOST_V6: Final = 0x10
STORE_HOST_V6: Final = 0x20
"""Bits of the system flag: the host is an IPv6 address."""
HOST_V4_BYTES: Final = 8
HOST_V6_BYTES: Final = 20

# --- a message of a batch body -------------------------------------------------------------------

BATCH_FLAG_AT: Final = 12
BATCH_BODY_LENGTH_AT: Final = 16
BATCH_BODY_AT: Final = 20
BATCH_FIXED_BYTES: Final = 22

# --- a ConsumeQueue entry ------------------------------------------------------------------------

ENTRY_OFFSET_AT: Final = 0
ENTRY_SIZE_AT: Final = 8
ENTRY_TAG_AT: Final = 12
ENTRY_BYTES: Final = 20

# --- an index file -------------------------------------------------------------------------------

INDEX_BEGIN_MS_AT: Final = 0
INDEX_END_MS_AT: Final = 8
INDEX_BEGIN_OFFSET_AT: Final = 16
INDEX_END_OFFSET_AT: Final = 24
INDEX_SLOTS_USED_AT: Final = 32
INDEX_NEXT_NUMBER_AT: Final = 36
INDEX_HEADER_BYTES: Final = 40
INDEX_SLOT_BYTES: Final = 4
INDEX_KEY_HASH_AT: Final = 0
INDEX_OFFSET_AT: Final = 4
INDEX_SECONDS_AT: Final = 12
INDEX_PREVIOUS_AT: Final = 16
INDEX_ENTRY_BYTES: Final = 20


def born_host_length(sys_flag: int) -> int:
    return HOST_V6_BYTES if sys_flag & BORN_HOST_V6 else HOST_V4_BYTES


def store_host_length(sys_flag: int) -> int:
    return HOST_V6_BYTES if sys_flag & STORE_HOST_V6 else HOST_V4_BYTES


def store_ms_at(sys_flag: int) -> int:
    """Position of the store time in a record; the store host follows it."""
    return BORN_HOST_AT + born_host_length(sys_flag)


def store_host_at(sys_flag: int) -> int:
    return store_ms_at(sys_flag) + 8


def body_at(sys_flag: int) -> int:
    """Position of the body in a record."""
    return store_host_at(sys_flag) + store_host_length(sys_flag) + RECONSUME_TIMES_BEFORE_BODY


def topic_length_bytes(magic: int) -> int:
    """How many bytes the length of the topic takes."""
    return 2 if magic == MAGIC_V2 else 1
