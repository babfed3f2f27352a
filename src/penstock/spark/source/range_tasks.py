"""Ranges of queues as a Spark task reads them: over the connection that its thread keeps."""

from collections.abc import Iterator

import pyarrow as pa

from penstock.arrow.connection_options import ConnectionOptions
from penstock.arrow.offset_ranges import QueueRange
from penstock.arrow.range_reader import RangeReader, ReadSettings
from penstock.spark.worker_connection import worker_connection


def read_range(
    connection: ConnectionOptions, part: QueueRange, reading: ReadSettings
) -> Iterator[pa.RecordBatch]:
    """The messages of a queue from `part.first` to before `part.until`.

    Raises DataLost, ReadGaveUp, and permanent refusals of a broker.
    """
    if part.first >= part.until:
        return
    with worker_connection(connection) as worker:
        work = RangeReader(worker.session, part, reading)
        try:
            while (batch := worker.run(work.batch())) is not None:
                yield batch
        finally:
            work.close()
