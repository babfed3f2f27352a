"""The demo's child process: writes until it is killed.

    python -m penstock.cli.demo_writer STORE PIPE async|sync

After each batch that the store has taken (sync flush: that is on the disk) it writes the number of
acknowledged messages, i64, to the pipe. Without a reader there it ends.
"""

import os
import sys
import time
from pathlib import Path

from penstock.cli import demo_load
from penstock.errors import StoreError
from penstock.store.put import PUT_OK
from penstock.store.store import MessageStore
from penstock.wire.record import Record

TICK_MS = 1000


def write(root: Path, pipe: int, *, sync_flush: bool) -> None:
    """Write messages 0, 1, 2, … for ever."""
    now_ms = time.time_ns() // 1_000_000
    store = MessageStore(root, demo_load.config(sync_flush=sync_flush), now_ms=now_ms)
    record = Record()
    number = 0
    ticked_ms = now_ms
    while True:
        now_ms = time.time_ns() // 1_000_000
        for _ in range(demo_load.BATCH):
            topic, record.queue_id = demo_load.lane(number)
            record.fill(topic, demo_load.body(number), demo_load.properties(number))
            record.born_ms = now_ms
            if store.put(record, now_ms) != PUT_OK:
                raise store.refusal or StoreError(f"message {number} was not taken")
            number += 1
        store.settle()
        if sync_flush:
            store.flusher.wait(store.log.end, 30.0)
            store.settle()
        os.write(pipe, number.to_bytes(8, "big"))
        if now_ms - ticked_ms >= TICK_MS:
            ticked_ms = now_ms
            store.tick(now_ms)


if __name__ == "__main__":
    try:
        write(Path(sys.argv[1]), int(sys.argv[2]), sync_flush=sys.argv[3] == "sync")
    except BrokenPipeError:
        os._exit(0)
    except (StoreError, OSError) as problem:
        print(f"penstock: the demo's writer: {problem}", file=sys.stderr, flush=True)
        os._exit(1)
