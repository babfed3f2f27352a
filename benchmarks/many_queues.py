"""The cost of 20,000 queues with one message each; each step runs in its own process.

The steps: the queues are filled and then idle until they are unmapped (new), opened after a clean
shutdown (clean), written again (mapped), and opened after they were written and the process was
killed (killed). `send` is one message to each queue, `watch` reads the end of a queue and waits for
messages there, `flush` syncs all queues.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

TOPICS, QUEUES = 2_500, 8

_CHILD = """
import json, os, sys, time
from pathlib import Path
from penstock.store.store import MessageStore
from penstock.wire.record import Record

def private_kib():
    rollup = dict(line.split(":", 1) for line in open("/proc/self/smaps_rollup") if ":" in line)
    return int(rollup["Anonymous"].split()[0])

def handles():
    return len(os.listdir("/proc/self/fd"))

topics, queues = {topics}, {queues}
before_kib = private_kib()
started = time.perf_counter()
now_ms = 1_700_000_000_000
store = MessageStore(sys.argv[1], now_ms=now_ms)
open_s = time.perf_counter() - started
sends, cpu = [], []
most = 0
record = Record()
if sys.argv[2] != "idle":
    for topic in range(topics):
        for queue_id in range(queues):
            record.fill(b"topic-%d" % topic, b"x" * 100)
            record.queue_id = queue_id
            at, cpu_at = time.perf_counter(), time.thread_time()
            assert store.put(record, now_ms) == 0, store.writer.fault
            cpu.append(time.thread_time() - cpu_at)
            sends.append(time.perf_counter() - at)
            if len(sends) % 100 == 0:
                store.publish()
                most = max(most, handles())
    store.publish()
if sys.argv[2] == "kill":
    print(json.dumps(dict(open_s=open_s)), flush=True)
    os.kill(os.getpid(), 9)
started = time.perf_counter()
for _ in range(300):
    now_ms += 1000
    store.tick(now_ms)
    store.maintenance.finish()
flush_s = time.perf_counter() - started
started = time.perf_counter()
for row in list(store.queues.rows):
    store.max_offset(row.topic.decode(), row.queue_id)
    store.watch(row)
watch_s = time.perf_counter() - started
sends.sort()
cpu.sort()
print(json.dumps(dict(
    open_s=open_s, handles_most=most, handles_idle=handles(), idle_kib=private_kib() - before_kib,
    flush_s=flush_s, watch_us=1e6 * watch_s / (topics * queues),
    send_us=[1e6 * sends[int(len(sends) * p)] for p in (0.5, 0.99)] if sends else None,
    cpu_us=1e6 * cpu[len(cpu) // 2] if cpu else None,
    blocks_mb=sum(f.stat().st_blocks for f in Path(sys.argv[1], "consumequeue").rglob("0*")) / 2048,
)))
store.close()
"""


def main() -> None:
    code = _CHILD.format(topics=TOPICS, queues=QUEUES)
    table = Table(title=f"{TOPICS * QUEUES:,} queues, one message each")
    columns = ("", "start s", "private MB", "fds most", "idle", "send µs", "p99", "CPU", "flush s",
               "watch µs", "disk MB")  # fmt: skip
    for column in columns:
        table.add_column(column, justify="left" if not column else "right")
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        path = str(Path(folder) / "store")
        for title, step in (
            ("new", "first"), ("clean", "idle"), ("mapped", "write"), ("", "kill"),
            ("killed", "idle"),
        ):  # fmt: skip
            done = subprocess.run(
                [sys.executable, "-c", code, path, step], capture_output=True, text=True
            )
            if not done.stdout:
                raise SystemExit(done.stderr)
            found = json.loads(done.stdout.splitlines()[0])
            if step == "kill":
                continue
            send = found["send_us"] or (0, 0)
            table.add_row(
                title, f"{found['open_s']:.2f}", f"{found['idle_kib'] / 1024:.1f}",
                str(found["handles_most"]), str(found["handles_idle"]),
                f"{send[0]:.0f}", f"{send[1]:.0f}", f"{found['cpu_us'] or 0:.0f}",
                f"{found['flush_s']:.1f}", f"{found['watch_us']:.2f}",
                f"{found['blocks_mb']:.0f}",
            )  # fmt: skip
    Console().print(table)


if __name__ == "__main__":
    main()
