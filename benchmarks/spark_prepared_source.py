"""The upper limit of Spark's Python Data Source API: a source of prepared Arrow batches.

It has the columns of Penstock's source. A task only returns the same batch again and again.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    InputPartition,
)
from pyspark.sql.streaming.datasource import ReadLimit
from pyspark.sql.types import StructType

from penstock.arrow import message_schema
from penstock.spark.spark_schema import spark_schema

BATCH_ROWS = 32_768
PARTITIONS = 2
BODY = b"x" * 128
EPOCH_US = 1_790_000_000_000_000


class PreparedSource(DataSource):
    """`rows` rows in two partitions; as a stream, `rows` in each micro-batch."""

    @classmethod
    def name(cls) -> str:
        return "prepared"

    def schema(self) -> StructType:
        return spark_schema(message_schema.DEFAULT_COLUMNS)

    def reader(self, schema: StructType) -> "PreparedReader":
        return PreparedReader(int(self.options["rows"]))

    def streamReader(self, schema: StructType) -> "PreparedStreamReader":  # noqa: N802
        return PreparedStreamReader(int(self.options["rows"]))


class Share(InputPartition):
    def __init__(self, rows: int) -> None:
        super().__init__(rows)


def shares(rows: int) -> list[InputPartition]:
    return [Share(rows * (n + 1) // PARTITIONS - rows * n // PARTITIONS) for n in range(PARTITIONS)]


def read(partition: InputPartition) -> Iterator[pa.RecordBatch]:
    left = partition.value
    batch = prebuilt(min(BATCH_ROWS, left))
    while left >= BATCH_ROWS:
        yield batch
        left -= BATCH_ROWS
    if left:
        yield batch.slice(0, left)


class PreparedReader(DataSourceReader):
    def __init__(self, rows: int) -> None:
        self._rows = rows

    def partitions(self) -> Sequence[InputPartition]:
        return shares(self._rows)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read(partition)


class PreparedStreamReader(DataSourceStreamReader):
    def __init__(self, rows: int) -> None:
        self._rows = rows

    def initialOffset(self) -> dict[str, int]:  # noqa: N802
        return {"row": 0}

    def latestOffset(self, start: Mapping[str, int], limit: ReadLimit) -> dict[str, int]:  # noqa: N802
        return {"row": start["row"] + self._rows}

    def partitions(
        self, start: Mapping[str, int], end: Mapping[str, int]
    ) -> Sequence[InputPartition]:
        return shares(end["row"] - start["row"])

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read(partition)


@cache  # Spark reuses its Python workers for several tasks
def prebuilt(rows: int) -> pa.RecordBatch:
    """The given number of messages, as the benchmark sends them."""
    values = {
        "topic": ["Load"] * rows,
        "broker": ["broker-a"] * rows,
        "queue_id": [0] * rows,
        "queue_offset": list(range(rows)),
        "message_id": [f"7F000001{n:024X}" for n in range(rows)],
        "tags": ["trial"] * rows,
        "keys": [str(n) for n in range(rows)],
        "body": [BODY] * rows,
        "properties": [
            [
                ("UNIQ_KEY", f"7F000001{n:024X}"),
                ("TAGS", "trial"),
                ("KEYS", str(n)),
                ("WAIT", "true"),
            ]
            for n in range(rows)
        ],
        "born_timestamp": [EPOCH_US] * rows,
        "store_timestamp": [EPOCH_US + 1_000] * rows,
        "reconsume_times": [0] * rows,
        "delay_level": [None] * rows,
        "deliver_timestamp": [None] * rows,
    }
    kinds = message_schema.arrow_schema(message_schema.DEFAULT_COLUMNS)
    return pa.RecordBatch.from_arrays(
        [pa.array(values[kind.name], kind.type) for kind in kinds], schema=kinds
    )
