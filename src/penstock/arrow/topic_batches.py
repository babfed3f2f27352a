"""The messages of topics as batches, read by a thread of their own, one batch ahead.

The thread has an event loop, so reading works in notebooks, and in whatever threads the consumer of
the batches uses. It decodes there as well: no other client shares this loop. It ends with the last
batch, with an error, or when the batches are no longer referenced.
"""

import os
import weakref
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress
from typing import Final

import pyarrow as pa

from penstock.arrow.cluster_metadata import AsyncClusterMetadata
from penstock.arrow.offset_ranges import QueueRange
from penstock.arrow.range_reader import RangeReader, ReadSettings
from penstock.arrow.source_options import SourceOptions
from penstock.client.sync.loop_thread import LoopThread, await_result
from penstock.errors import ClientClosed, ReadFailed

CLOSE_SECONDS: Final = 2.0
"""How long to wait until connections are closed."""


class TopicBatches(Iterator[pa.RecordBatch]):
    """The messages that exist when it is created, by topic, broker and queue, in offset order."""

    def __init__(self, options: SourceOptions) -> None:
        cluster = AsyncClusterMetadata(options.connection, timeout_ms=options.read_timeout_ms)
        self._thread = thread = LoopThread("penstock-arrow")
        self._ranges = _RangeBatches(cluster, options)
        self._next: Future[pa.RecordBatch | None] | None = None
        self._error: BaseException | None = None
        self._close = weakref.finalize(self, _close, os.getpid(), thread, cluster)
        try:
            thread.run(self._ranges.start)
        except BaseException:
            self._close()
            raise

    def __next__(self) -> pa.RecordBatch:
        """The next batch; raises DataLost, ReadGaveUp, and permanent refusals of a broker."""
        if self._error is not None:  # the end would look like the end of the messages
            raise ReadFailed(f"this read has failed before: {self._error}") from self._error
        if not self._close.alive:
            raise StopIteration
        try:
            batch = await_result(self._next or self._thread.submit(self._ranges.batch))
        except BaseException as error:
            self._error = error
            self._close()
            raise
        if batch is None:
            self._close()
            raise StopIteration
        self._next = self._thread.submit(self._ranges.batch)
        return batch


class _RangeBatches:
    """Reads ranges of queues one after another; runs in the loop."""

    def __init__(self, cluster: AsyncClusterMetadata, options: SourceOptions) -> None:
        self._cluster = cluster
        self._options = options
        self._settings = ReadSettings.of(options)
        self._rest: deque[QueueRange] = deque()
        self._reader: RangeReader | None = None

    async def start(self) -> None:
        """Connect, and fix the ranges."""
        await self._cluster.start()
        self._rest.extend(sorted(await self._cluster.batch_ranges(self._options)))

    async def batch(self) -> pa.RecordBatch | None:
        """The next batch; None after the last."""
        while self._reader is not None or self._rest:
            if self._reader is None:
                session = self._cluster.session
                self._reader = RangeReader(session, self._rest.popleft(), self._settings)
            batch = await self._reader.batch()
            if batch is not None:
                return batch
            self._reader.close()
            self._reader = None
        return None


def _close(pid: int, thread: LoopThread, cluster: AsyncClusterMetadata) -> None:
    """Close the connections and end the thread; the garbage collector may call this anywhere."""
    if pid != os.getpid():  # the connections belong to the parent
        return

    with suppress(ClientClosed, TimeoutError):
        closing = thread.submit(cluster.close)
        if thread.is_current():
            closing.add_done_callback(lambda _: thread.loop.stop())
            return
        closing.result(CLOSE_SECONDS)
    thread.stop()
