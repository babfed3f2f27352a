"""A program that a test runs: decodes bytes at the end of readable memory."""

import ctypes
import mmap
import random

from penstock.arrow.columns.column_builder import DONE, ColumnBuilder, LogFilter
from penstock.arrow.message_schema import FIELDS, stored_columns
from tests.unit.arrow.columns.test_column_builder import log_of
from tests.unit.client.consumer.consumer_kit import record

READABLE, FORBIDDEN = 1 << 17, 1 << 20


def guarded() -> tuple[mmap.mmap, memoryview]:
    """Memory followed by a protected page: reading past its end crashes the process."""
    whole = mmap.mmap(-1, READABLE + FORBIDDEN)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(whole))
    libc = ctypes.CDLL(None)
    assert libc.mprotect(ctypes.c_void_p(begin + READABLE), FORBIDDEN, 0) == 0
    return whole, memoryview((ctypes.c_ubyte * READABLE).from_address(begin)).cast("B")


def random_log(rng: random.Random) -> bytearray:
    """Records of many lengths, some of them damaged."""
    records = []
    for offset in range(rng.randint(1, 9)):
        properties: dict[str, str | None] = {}
        for name in rng.sample(["UNIQ_KEY", "KEYS", "TAGS", "n" * rng.randint(1, 30)], 3):
            if rng.random() < 0.6:
                properties[name] = "v" * rng.randint(1, 70)
        length = rng.choice([0, 20, 300, 700, 9000])
        records.append(record(offset, bytes(length), properties=properties))
    log = bytearray(log_of(*records))
    for _ in range(rng.choice([0, 0, 1, 3])):
        log[rng.randrange(len(log))] = rng.randrange(256)
    return log


def main() -> None:
    whole, memory = guarded()
    rng = random.Random(7)
    builder = ColumnBuilder(stored_columns(list(FIELDS)))
    for round_number in range(400):
        log = random_log(rng)
        data, end = memory[READABLE - len(log) :], len(log)
        data[:] = log
        wanted = LogFilter(lambda topic: True, check_crc=round_number % 2 == 0)
        at, why = 0, -1
        while 0 <= at < end and why != DONE:
            why = builder.add_log(data, at, end, limit=end, log_offset=0, wanted=wanted)
            at = builder.resume
        builder.add_answer(data, 0, end, first=0, until=1 << 60, check_crc=wanted.check_crc)
        builder.take().validate(full=True)
    print("nothing after the end was read", len(whole))


if __name__ == "__main__":
    main()
