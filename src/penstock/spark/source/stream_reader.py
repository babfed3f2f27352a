"""Streaming reads of topics: plans the offsets of each micro-batch.

Spark keeps one reader, in one process, as long as the query runs. Its offsets contain all queues
that were ever read: a queue that is deleted, or whose broker is unavailable, keeps its offset.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from penstock.arrow.batch_plan import boundary_offsets
from penstock.arrow.cluster_metadata import ClusterMetadata
from penstock.arrow.queue_offsets import (
    Loss,
    OffsetsJson,
    QueueOffsets,
    format_queues,
    from_json,
    initial_in,
    limit_rows,
    report_losses,
    rows_between,
    shrunk_queues,
    to_json,
)
from penstock.arrow.source_options import SourceOptions
from penstock.clock import Clock, LoopClock
from penstock.errors import BadSetting, PenstockError
from penstock.spark.source.batch_readers import fitting, make_partitions, read_ranges
from penstock.spark.worker_entry import in_worker
from penstock.wire.bodies.client_bodies import MessageQueue

log = logging.getLogger(__name__)

QUEUE_REFRESH_MS: Final = 1_000
"""How often to look for new topics and queues."""


class TopicStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Plans micro-batches of messages and reads them."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._options = options
        self._rows = fitting(options, schema)
        self._clock: Clock = LoopClock()
        self._metadata: ClusterMetadata | None = None
        self._initial: OffsetsJson | None = None
        self._target: dict[MessageQueue, int] | None = None
        """Trigger.AvailableNow: where this run ends."""
        self._seen: dict[MessageQueue, int] = {}
        """The last known ends: for progress reports; messages before them exist."""
        self._queues: set[MessageQueue] = set()
        self._refreshed_ms: int | None = None
        self._unavailable: set[MessageQueue] = set()
        self._deleted: set[MessageQueue] = set()
        """Queues that were reported as deleted: they keep their offsets."""
        self._triggered_ms: int | None = None
        self._committed: dict[MessageQueue, int] = {}

    # --- the offsets of a batch

    @in_worker()
    def initialOffset(self) -> OffsetsJson:  # noqa: N802
        """Where a new query starts; the same each time it is called."""
        if self._initial is None:
            cluster = self._cluster()
            queues = cluster.required_queues(self._options.topics)
            ends = cluster.all_max_offsets(queues) if self._target is None else self._target
            begins = cluster.all_min_offsets(ends)
            wanted = self._options.starting
            at = cluster.all_offsets_at(ends, wanted) if isinstance(wanted, int) else {}
            start = boundary_offsets(wanted, "startingOffsets", begins, ends, at)
            self._initial = to_json(start)
        return self._initial

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        if self._options.rows_max is not None:
            return ReadMaxRows(self._options.rows_max)
        if self._options.rows_min is not None:
            return ReadMinRows(self._options.rows_min)
        return ReadAllAvailable()

    @in_worker()
    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Fix the end of this run: all topics and messages that exist now."""
        cluster = self._cluster()
        self._target = cluster.all_max_offsets(cluster.all_queues(self._options.topics))
        self._seen = dict(self._target)

    @in_worker()
    def latestOffset(self, start: OffsetsJson, limit: ReadLimit) -> OffsetsJson:  # noqa: N802
        """The end of the next batch; `start` itself if there is nothing to read."""
        offsets = from_json(start)
        self._commit_offsets(offsets)
        ends = self._ends(offsets)
        shrunk = shrunk_queues(offsets, ends)
        if shrunk:
            report_losses(shrunk, fail=self._options.fail_on_data_loss)
        begins = self._begins([*(ends.keys() - offsets.keys()), *(loss.queue for loss in shrunk)])
        ends = {q: n for q, n in ends.items() if q in offsets or q in begins}
        first = {**offsets, **begins}
        rows = rows_between(first, ends)
        is_first = start == self._initial  # Spark runs the first batch even if it is empty
        if rows == 0 and not shrunk and not is_first:
            return start
        rows_max, rows_min = self._limits(limit)
        may_wait = not is_first and not shrunk
        if may_wait and rows_min is not None and self._waits(rows, rows_min):
            return start
        self._triggered_ms = self._clock.monotonic_ms()
        end = ends if rows_max is None else limit_rows(first, ends, rows_max)
        return to_json(end, first if is_first else begins or None)

    def reportLatestOffset(self) -> OffsetsJson | None:  # noqa: N802
        """The last known ends of all queues."""
        return to_json(self._seen) if self._seen else None

    def _limits(self, limit: ReadLimit) -> tuple[int | None, int | None]:
        """The maximum and minimum number of messages."""
        if isinstance(limit, ReadAllAvailable):
            return None, None
        if isinstance(limit, ReadMaxRows):
            return limit.max_rows, self._options.rows_min
        if isinstance(limit, ReadMinRows):
            return self._options.rows_max, limit.min_rows
        raise BadSetting(
            f"a stream of messages can't be limited by {type(limit).__name__}",
            hint="limit it by rows: maxOffsetsPerTrigger",
        )

    def _waits(self, rows: int, rows_min: int) -> bool:
        """Whether to wait for more messages; a run to a fixed end takes what there is."""
        if rows >= rows_min or self._target is not None or self._triggered_ms is None:
            return False
        waited_ms = self._clock.monotonic_ms() - self._triggered_ms
        return waited_ms < self._options.trigger_delay_ms

    def _ends(self, offsets: QueueOffsets) -> dict[MessageQueue, int]:
        """The end of every queue; for a deleted or unavailable queue the current offset."""
        if self._target is not None:
            self._target |= self._rest_of_target(offsets, self._target)
            return {**offsets, **self._target}
        ends = self._cluster().max_offsets(self._known_queues(offsets))
        self._log_unavailable(ends.unavailable)
        found = {
            queue: end
            for queue, end in ends.offsets.items()
            if queue not in ends.from_replica or end >= offsets.get(queue, 0)
        }
        self._seen |= found
        return {**offsets, **found}

    def _rest_of_target(
        self, offsets: QueueOffsets, target: QueueOffsets
    ) -> dict[MessageQueue, int]:
        """Ends that were unknown when a run to a fixed end started."""
        missing = self._missing_queues(offsets, target)
        rest = self._cluster().all_max_offsets(missing) if missing else {}
        behind = {q for q in offsets.keys() & target.keys() if target[q] < offsets[q]}
        if behind:  # a replica may have answered: that is not a loss
            ends = self._cluster().max_offsets(behind)
            for queue in behind:
                is_known = queue in ends.offsets and queue not in ends.from_replica
                rest[queue] = ends.offsets[queue] if is_known else offsets[queue]
        return rest

    def _log_unavailable(self, unavailable: Mapping[MessageQueue, PenstockError]) -> None:
        """Log once which brokers do not answer: Spark may ask a hundred times a second."""
        new = sorted(unavailable.keys() - self._unavailable)
        if new:
            log.warning(
                "%d queues are unavailable and keep their offsets, such as %s: %s",
                len(unavailable),
                format_queues(new[:1]),
                unavailable[new[0]],
            )
        self._unavailable = set(unavailable)

    def _begins(self, queues: Iterable[MessageQueue]) -> dict[MessageQueue, int]:
        wanted, cluster = set(queues), self._cluster()
        if not wanted:
            return {}
        # A run to a fixed end that skipped a queue would end without it.
        is_fixed = self._target is not None
        return cluster.all_min_offsets(wanted) if is_fixed else cluster.min_offsets(wanted).offsets

    # --- new and deleted queues

    def _known_queues(self, offsets: QueueOffsets) -> set[MessageQueue]:
        """The existing queues, and those that were read and may come back; the last known ones if
        no server answers."""
        now_ms = self._clock.monotonic_ms()
        if self._refreshed_ms is not None and now_ms - self._refreshed_ms < QUEUE_REFRESH_MS:
            return self._queues
        cluster = self._cluster()
        if self._refreshed_ms is None:
            existing = cluster.all_queues(self._options.topics)
        else:
            try:
                existing = cluster.queues(self._options.topics)
            except PenstockError as error:
                if not error.retry:
                    raise
                log.warning("could not look for new queues: %s", error)
                existing = self._queues
        self._deleted -= existing
        self._queues = existing | self._missing_queues(offsets, existing)
        self._refreshed_ms = now_ms
        return self._queues

    def _missing_queues(
        self, offsets: QueueOffsets, existing: Iterable[MessageQueue]
    ) -> set[MessageQueue]:
        """Queues that were read and are in no route now, except those that are deleted.

        Queues that the options no longer select keep their offsets, too.
        """
        selected = self._options.topics.includes
        missing = set(filter(selected, offsets.keys() - set(existing) - self._deleted))
        if not missing:
            return set()
        deleted = self._cluster().deleted_queues(missing)
        if deleted:
            losses = [
                Loss(
                    queue,
                    None,
                    f"it was read up to offset {offsets[queue]}, but its broker no longer has it",
                )
                for queue in sorted(deleted)
            ]
            report_losses(losses, fail=self._options.fail_on_data_loss)
            self._deleted |= deleted
        return missing - deleted

    # --- reading

    @in_worker()
    def partitions(self, start: OffsetsJson, end: OffsetsJson) -> list[InputPartition]:
        """The ranges of one micro-batch; checks that its offsets still exist."""
        first, until = from_json(start) | (initial_in(end) or {}), from_json(end)
        active = {queue for queue, offset in until.items() if offset != first.get(queue)}
        if not active:
            return []
        cluster = self._cluster()
        begins = cluster.min_offsets(active)
        unseen = {queue for queue in active if self._seen.get(queue, -1) < until[queue]}
        ends = cluster.max_offsets(unseen)
        known_ends = {q: n for q, n in ends.offsets.items() if q not in ends.from_replica}
        if begins.unavailable:  # a deleted topic has no route
            known_ends |= dict.fromkeys(cluster.deleted_queues(begins.unavailable), 0)
        chosen = {queue: until[queue] for queue in active}
        return make_partitions(self._options, first, chosen, begins.offsets, known_ends)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_ranges(self._options, self._rows, partition)

    # --- progress

    def commit(self, end: OffsetsJson) -> None:
        self._commit_offsets(from_json(end))

    def _commit_offsets(self, offsets: QueueOffsets) -> None:
        """Commit the query's offsets to brokers, if the option commitGroup is set.

        Spark commits the last batch only when the next one starts, so the start of that one is
        committed as well.
        """
        group = self._options.commit_group
        if group is None:
            return
        due = {
            queue: offset
            for queue, offset in offsets.items()
            if self._committed.get(queue) != offset and queue not in self._deleted
        }
        if due:
            self._committed |= self._cluster().commit_offsets(group, due)

    # --- connections

    def _cluster(self) -> ClusterMetadata:
        if self._metadata is None:
            options = self._options
            self._metadata = ClusterMetadata(options.connection, timeout_ms=options.read_timeout_ms)
            self._metadata.start()
        return self._metadata

    def stop(self) -> None:
        if self._metadata is not None:
            self._metadata.close()
            self._metadata = None
