"""Private memory of an idle store with 100 topics of 8 queues, in its own process."""

import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

TOPICS, QUEUES = 100, 8

_CHILD = """
import sys
from penstock.store.store import MessageStore
from penstock.wire.record import Record
store = MessageStore(sys.argv[1], now_ms=1)
if sys.argv[2] == "fill":
    record = Record()
    for topic in range({topics}):
        for queue_id in range({queues}):
            record.fill(b"topic-%d" % topic, b"x" * 100)
            record.queue_id = queue_id
            assert store.put(record, 1) == 0
    store.publish()
else:
    import os
    assert len(store.queues.rows) == {topics} * {queues}
    rollup = dict(line.split(":", 1) for line in open("/proc/self/smaps_rollup") if ":" in line)
    kib = sum(int(rollup[k].split()[0]) for k in ("Private_Clean", "Private_Dirty"))
    print(kib, int(rollup["Rss"].split()[0]), len(os.listdir("/proc/self/fd")))
store.close()
"""


def main() -> None:
    code = _CHILD.format(topics=TOPICS, queues=QUEUES)
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        path = str(Path(folder) / "store")
        subprocess.run([sys.executable, "-c", code, path, "fill"], check=True)
        done = subprocess.run(
            [sys.executable, "-c", code, path, "idle"], check=True, capture_output=True, text=True
        )
    private, rss, files = (int(n) for n in done.stdout.split())
    table = Table(title=f"idle store, {TOPICS} topics × {QUEUES} queues")  # noqa: RUF001
    for column in ("private MB", "target", "resident MB", "open files"):
        table.add_column(column, justify="right")
    table.add_row(f"{private / 1024:.1f}", "< 60", f"{rss / 1024:.1f}", str(files))
    Console().print(table)


if __name__ == "__main__":
    main()
