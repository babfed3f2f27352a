"""The stream over topics: which offsets a batch has, and what became of the batches before.

Spark keeps one of these objects, in one process, as long as the query runs. Offsets name all queues
that were ever read: one whose broker is away, or that is gone, stays where it is.
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

from penstock.clock import Clock, LoopClock
from penstock.errors import BadSetting, PenstockError
from penstock.spark.cluster_metadata import ClusterMetadata
from penstock.spark.source.data_source import ArrowRows, partitions_between, place, read_parts
from penstock.spark.source.queue_offsets import (
    Json,
    Loss,
    QueueOffsets,
    from_json,
    gone_back,
    initial_in,
    limited,
    report,
    rows_between,
    to_json,
)
from penstock.spark.source.source_options import SourceOptions
from penstock.spark.worker_entry import in_worker
from penstock.wire.bodies.client_bodies import MessageQueue

log = logging.getLogger(__name__)

LOOK_MS: Final = 1_000
"""So often it is looked whether there are new topics and queues."""


class TopicStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Batches of messages as they come."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._options = options
        self._rows = ArrowRows(options, schema)
        self._clock: Clock = LoopClock()
        self._open: ClusterMetadata | None = None
        self._initial: Json | None = None
        self._target: dict[MessageQueue, int] | None = None
        """Trigger.AvailableNow: where this run ends."""
        self._seen: dict[MessageQueue, int] = {}
        """Ends as they were last seen: for progress reports, and they are there to be read."""
        self._queues: set[MessageQueue] = set()
        self._looked_ms: int | None = None
        self._away: set[MessageQueue] = set()
        self._gone: set[MessageQueue] = set()
        """Queues that were told of as gone: they stay where they are."""
        self._triggered_ms: int | None = None
        self._committed: dict[MessageQueue, int] = {}

    # --- where a batch begins and ends

    @in_worker()
    def initialOffset(self) -> Json:  # noqa: N802
        """Where a new query begins. Asked more than once, and the same each time."""
        if self._initial is None:
            cluster = self._cluster()
            queues = cluster.required_queues(self._options.topics)
            ends = cluster.all_max_offsets(queues) if self._target is None else self._target
            begins = cluster.all_min_offsets(ends)
            self._initial = to_json(place(cluster, self._options, "starting", begins, ends))
        return self._initial

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        if self._options.rows_max is not None:
            return ReadMaxRows(self._options.rows_max)
        if self._options.rows_min is not None:
            return ReadMinRows(self._options.rows_min)
        return ReadAllAvailable()

    @in_worker()
    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Fix the end of this run: all topics and messages that are there now."""
        cluster = self._cluster()
        self._target = cluster.all_max_offsets(cluster.all_queues(self._options.topics))
        self._seen = dict(self._target)

    @in_worker()
    def latestOffset(self, start: Json, limit: ReadLimit) -> Json:  # noqa: N802
        """The end of the next batch; `start` itself where there is nothing to read."""
        marks = from_json(start)
        self._store_progress(marks)
        ends = self._ends(marks)
        back = gone_back(marks, ends)
        if back:
            report(back, fail=self._options.fail_on_data_loss)
        begins = self._begins([*(ends.keys() - marks.keys()), *(loss.queue for loss in back)])
        ends = {q: n for q, n in ends.items() if q in marks or q in begins}
        full = {**marks, **begins}
        rows = rows_between(full, ends)
        is_first = start == self._initial  # Spark runs the first batch even if it is empty
        if rows == 0 and not back and not is_first:
            return start
        rows_max, rows_min = self._limits(limit)
        may_wait = not is_first and not back
        if may_wait and rows_min is not None and self._waits(rows, rows_min):
            return start
        self._triggered_ms = self._clock.monotonic_ms()
        end = ends if rows_max is None else limited(full, ends, rows_max)
        return to_json(end, full if is_first else begins or None)

    def reportLatestOffset(self) -> Json | None:  # noqa: N802
        """The ends of all queues, as they were last seen."""
        return to_json(self._seen) if self._seen else None

    def _limits(self, limit: ReadLimit) -> tuple[int | None, int | None]:
        """At most and at least so many messages."""
        if isinstance(limit, ReadAllAvailable):
            return None, None
        if isinstance(limit, ReadMaxRows):
            return limit.max_rows, self._options.rows_min
        if isinstance(limit, ReadMinRows):
            return self._options.rows_max, limit.min_rows
        raise BadSetting(
            f"a stream of messages can't be limited by {type(limit).__name__}",
            hint="it can by rows: maxOffsetsPerTrigger",
        )

    def _waits(self, rows: int, rows_min: int) -> bool:
        """Whether so few messages wait for more; a run to a fixed end takes what there is."""
        if rows >= rows_min or self._target is not None or self._triggered_ms is None:
            return False
        waited_ms = self._clock.monotonic_ms() - self._triggered_ms
        return waited_ms < self._options.trigger_delay_ms

    def _ends(self, marks: QueueOffsets) -> dict[MessageQueue, int]:
        """The end of every queue; of one that is away or gone, the place we have come to."""
        if self._target is not None:
            self._target |= self._rest_of_target(marks, self._target)
            return {**marks, **self._target}
        ends = self._cluster().max_offsets(self._look(marks))
        self._tell_away(ends.unavailable)
        found = {
            queue: end
            for queue, end in ends.offsets.items()
            if queue not in ends.from_replica or end >= marks.get(queue, 0)
        }
        self._seen |= found
        return {**marks, **found}

    def _rest_of_target(self, marks: QueueOffsets, target: QueueOffsets) -> dict[MessageQueue, int]:
        """Ends that could not be told when a run to a fixed end began."""
        absent = self._absent(marks, target)
        rest = self._cluster().all_max_offsets(absent) if absent else {}
        behind = {queue for queue in marks.keys() & target.keys() if target[queue] < marks[queue]}
        if behind:  # maybe a replica was asked: that is no loss
            ends = self._cluster().max_offsets(behind)
            for queue in behind:
                is_known = queue in ends.offsets and queue not in ends.from_replica
                rest[queue] = ends.offsets[queue] if is_known else marks[queue]
        return rest

    def _tell_away(self, away: Mapping[MessageQueue, PenstockError]) -> None:
        """Say which brokers do not answer, once: Spark may ask a hundred times a second."""
        new = sorted(away.keys() - self._away)
        if new:
            log.warning(
                "%d queues stay where they are, such as %s: %s", len(away), new[0], away[new[0]]
            )
        self._away = set(away)

    def _begins(self, queues: Iterable[MessageQueue]) -> dict[MessageQueue, int]:
        wanted, cluster = set(queues), self._cluster()
        if not wanted:
            return {}
        # A run to a fixed end that left some out would end without them.
        is_fixed = self._target is not None
        return cluster.all_min_offsets(wanted) if is_fixed else cluster.min_offsets(wanted).offsets

    # --- queues that come and go

    def _look(self, marks: QueueOffsets) -> set[MessageQueue]:
        """The queues that there are, and those that we read and that may come back; those of
        before while nobody can tell."""
        now_ms = self._clock.monotonic_ms()
        if self._looked_ms is not None and now_ms - self._looked_ms < LOOK_MS:
            return self._queues
        cluster = self._cluster()
        if self._looked_ms is None:
            there = cluster.all_queues(self._options.topics)
        else:
            try:
                there = cluster.queues(self._options.topics)
            except PenstockError as error:
                if not error.retry:
                    raise
                log.warning("whether there are new queues is unknown: %s", error)
                there = self._queues
        self._gone -= there
        self._queues = there | self._absent(marks, there)
        self._looked_ms = now_ms
        return self._queues

    def _absent(self, marks: QueueOffsets, there: Iterable[MessageQueue]) -> set[MessageQueue]:
        """Queues that we read and that no route names now, but for those that are gone for good.

        Those that the options do not choose any more stay where they are, too.
        """
        absent = set(filter(self._options.topics.include, marks.keys() - set(there) - self._gone))
        if not absent:
            return set()
        gone = self._cluster().deleted_queues(absent)
        if gone:
            report(
                [
                    Loss(
                        queue,
                        None,
                        f"it was read up to offset {marks[queue]}, and its broker has "
                        "no such queue any more",
                    )
                    for queue in sorted(gone)
                ],
                fail=self._options.fail_on_data_loss,
            )
            self._gone |= gone
        return absent - gone

    # --- what tasks read

    @in_worker()
    def partitions(self, start: Json, end: Json) -> list[InputPartition]:
        first, until = from_json(start) | (initial_in(end) or {}), from_json(end)
        active = {queue for queue, offset in until.items() if offset != first.get(queue)}
        if not active:
            return []
        cluster = self._cluster()
        begins = cluster.min_offsets(active)
        unseen = {queue for queue in active if self._seen.get(queue, -1) < until[queue]}
        ends = cluster.max_offsets(unseen)
        there = {q: n for q, n in ends.offsets.items() if q not in ends.from_replica}
        if begins.unavailable:  # of a topic that was deleted nobody tells where its broker is
            there |= dict.fromkeys(cluster.deleted_queues(begins.unavailable), 0)
        chosen = {queue: until[queue] for queue in active}
        return partitions_between(self._options, first, chosen, begins.offsets, there)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_parts(self._options, self._rows, partition)

    # --- progress

    def commit(self, end: Json) -> None:
        self._store_progress(from_json(end))

    def _store_progress(self, marks: QueueOffsets) -> None:
        """Tell the brokers how far the query is, where a group is named for that.

        Spark commits the last batch only when the next one begins: so the beginning of that one
        counts as well.
        """
        group = self._options.commit_group
        if group is None:
            return
        due = {
            queue: offset
            for queue, offset in marks.items()
            if self._committed.get(queue) != offset and queue not in self._gone
        }
        if due:
            self._committed |= self._cluster().commit_offsets(group, due)

    # --- life

    def _cluster(self) -> ClusterMetadata:
        if self._open is None:
            options = self._options
            self._open = ClusterMetadata(options.connection, timeout_ms=options.read_timeout_ms)
            self._open.start()
        return self._open

    def stop(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None
