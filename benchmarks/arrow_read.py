"""`penstock.arrow` compared with the Spark source: the same messages, all default columns.

Spark runs two tasks at a time, `penstock.arrow` reads in one thread; the broker shares the two
cores. `PENSTOCK_SPARK_ROWS` changes the number of rows.
"""

from functools import partial

import penstock.arrow
from benchmarks.spark import ROUNDS, ROWS, TOPIC, alternate, bench, in_tasks, noop, ratios, show


def drain(**options: str) -> None:
    """Read all batches and keep none."""
    rows = sum(batch.num_rows for batch in penstock.arrow.open_reader(TOPIC, **options))
    assert rows == ROWS


def main() -> None:
    with bench() as b:
        b.fill()
        for frame in (b.broker(), b.log()):
            noop(frame)
        log = {"mode": "log", "path": str(b.store)}
        broker = {"nameserver": b.up.address}
        seconds = alternate(
            {
                "Spark, log files": lambda: noop(b.log()),
                "Spark, log files, 1 task": partial(in_tasks, b.log, 1),
                "penstock.arrow, log files": partial(drain, **log),
                "Spark, broker": lambda: noop(b.broker()),
                "Spark, broker, 1 task": partial(in_tasks, b.broker, 1),
                "penstock.arrow, broker": partial(drain, **broker),
            },
            ROUNDS,
        )
        show(f"all columns of {ROWS:,} messages", ratios(seconds, "Spark, broker"))
