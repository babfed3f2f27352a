"""Run by a test in a process of its own: decodes bytes behind which nothing may be read."""

import ctypes
import mmap
import random

from penstock.spark.arrow.columns import DONE, ColumnBuilder, LogFilter
from penstock.spark.message_schema import FIELDS, stored_columns
from tests.unit.client.consumer.consumer_kit import record
from tests.unit.spark.arrow.test_columns import log_of

ROOM, FORBIDDEN = 1 << 17, 1 << 20


def guarded() -> tuple[mmap.mmap, memoryview]:
    """Some memory; whoever reads what follows it ends at once."""
    whole = mmap.mmap(-1, ROOM + FORBIDDEN)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(whole))
    libc = ctypes.CDLL(None)
    assert libc.mprotect(ctypes.c_void_p(begin + ROOM), FORBIDDEN, 0) == 0
    return whole, memoryview((ctypes.c_ubyte * ROOM).from_address(begin)).cast("B")


def some_log(chance: random.Random) -> bytearray:
    """Records of all lengths, damaged now and then."""
    records = []
    for offset in range(chance.randint(1, 9)):
        properties: dict[str, str | None] = {}
        for name in chance.sample(["UNIQ_KEY", "KEYS", "TAGS", "n" * chance.randint(1, 30)], 3):
            if chance.random() < 0.6:
                properties[name] = "v" * chance.randint(1, 70)
        length = chance.choice([0, 20, 300, 700, 9000])
        records.append(record(offset, bytes(length), properties=properties))
    log = bytearray(log_of(*records))
    for _ in range(chance.choice([0, 0, 1, 3])):
        log[chance.randrange(len(log))] = chance.randrange(256)
    return log


def main() -> None:
    whole, room = guarded()
    chance = random.Random(7)
    builder = ColumnBuilder(stored_columns(list(FIELDS)))
    for turn in range(400):
        log = some_log(chance)
        data, end = room[ROOM - len(log) :], len(log)
        data[:] = log
        wanted = LogFilter(lambda topic: True, check_crc=turn % 2 == 0)
        at, why = 0, -1
        while 0 <= at < end and why != DONE:
            why = builder.add_log(data, at, end, limit=end, log_offset=0, wanted=wanted)
            at = builder.resume
        builder.add_answer(data, 0, end, first=0, until=1 << 60)
        builder.take().validate(full=True)
    print("nothing behind the end was read", len(whole))


if __name__ == "__main__":
    main()
