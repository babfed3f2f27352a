"""The stream reader with the calls that Spark makes, on a fake cluster."""

import json
from collections.abc import Iterable
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    ReadMinRows,
)

from penstock.arrow.cluster_metadata import QueriedOffsets
from penstock.arrow.queue_offsets import QueueOffsets
from penstock.arrow.source_options import SourceOptions, TopicSelection
from penstock.errors import BadSetting, DataLost, NoNameServer, PeerUnreachable, ReadGaveUp
from penstock.spark.source.data_source import DefaultSource
from penstock.spark.source.stream_reader import QUEUE_REFRESH_MS, TopicStreamReader
from penstock.testing.virtual_clock import VirtualClock
from penstock.wire.bodies.client_bodies import MessageQueue

Q = [MessageQueue("orders", "broker-a", n) for n in range(8)]
B = MessageQueue("orders", "broker-b", 0)
ALL = ReadAllAvailable()
Json = dict[str, Any]


class FakeCluster:
    """Queues with their ends; some unavailable, deleted, or known only by a replica."""

    def __init__(self, ends: dict[MessageQueue, int]) -> None:
        self.ends = dict(ends)
        self.first: dict[MessageQueue, int] = {}
        self.unavailable: set[MessageQueue] = set()
        self.deleted: set[MessageQueue] = set()
        self.replicas: set[MessageQueue] = set()
        self.nameservers_down = False
        self.stored: dict[MessageQueue, int] = {}
        self.asked = 0
        self.deleted_queries = 0
        self.commits: list[set[MessageQueue]] = []

    def queues(self, topics: TopicSelection) -> set[MessageQueue]:
        self.asked += 1
        if self.nameservers_down:
            raise NoNameServer("no NameServer answers")
        return set(self.ends)

    all_queues = required_queues = queues

    def max_offsets(self, queues: Iterable[MessageQueue]) -> QueriedOffsets:
        return self._of(queues, self.ends)

    def min_offsets(self, queues: Iterable[MessageQueue]) -> QueriedOffsets:
        return self._of(queues, self.first)

    def _of(self, queues: Iterable[MessageQueue], table: QueueOffsets) -> QueriedOffsets:
        ends = QueriedOffsets(from_replica=frozenset(self.replicas))
        for queue in queues:
            if queue in self.unavailable:
                ends.unavailable[queue] = PeerUnreachable("away", address=queue.broker_name)
            else:
                ends.offsets[queue] = table.get(queue, 0)
        return ends

    def all_max_offsets(self, queues: Iterable[MessageQueue]) -> dict[MessageQueue, int]:
        return self._whole(self.max_offsets(queues))

    def all_min_offsets(self, queues: Iterable[MessageQueue]) -> dict[MessageQueue, int]:
        return self._whole(self.min_offsets(queues))

    def _whole(self, ends: QueriedOffsets) -> dict[MessageQueue, int]:
        if ends.unavailable:
            raise ReadGaveUp("away for too long")
        return ends.offsets

    def deleted_queues(self, queues: Iterable[MessageQueue]) -> set[MessageQueue]:
        self.deleted_queries += 1
        return set(queues) & self.deleted

    def commit_offsets(self, group: str, marks: QueueOffsets) -> dict[MessageQueue, int]:
        self.commits.append(set(marks))
        done = {q: n for q, n in marks.items() if q not in self.unavailable | self.deleted}
        self.stored.update(done)
        return done


class Stream:
    """Simulates Spark: requests batches, keeps the offsets, and reads each batch."""

    def __init__(self, cluster: FakeCluster, *, now: bool = False, **options: str) -> None:
        given = SourceOptions.of({"subscribe": "orders", **options}, stream=True)
        schema = DefaultSource({}).schema()
        self.reader = TopicStreamReader(given, schema)
        self.clock = self.reader._clock = VirtualClock()
        self.reader._metadata = cluster  # type: ignore[assignment]
        self.cluster = cluster
        self.at: Json | None = None
        if now:
            self.reader.prepareForTriggerAvailableNow()

    def batch(self, limit: ReadLimit | None = None) -> dict[tuple[str, int], tuple[int, int]]:
        """The ranges of the next batch by broker and queue; empty if there is none."""
        self.clock.advance(QUEUE_REFRESH_MS)
        start = self.reader.initialOffset() if self.at is None else self.at
        end = self.reader.latestOffset(start, limit or self.reader.getDefaultReadLimit())
        end = json.loads(json.dumps(end))
        if json.dumps(end) == json.dumps(self.at):
            return {}
        found = self.parts(start, end)
        self.at = end
        return found

    def parts(self, start: Json, end: Json) -> dict[tuple[str, int], tuple[int, int]]:
        parts = [part for each in self.reader.partitions(start, end) for part in each.value]
        return {(part.broker, part.queue_id): (part.first, part.until) for part in parts}


def a(number: int) -> tuple[str, int]:
    return ("broker-a", number)


def test_stream_starts_at_the_end() -> None:
    cluster = FakeCluster({Q[0]: 5, Q[1]: 7})
    stream = Stream(cluster)
    assert stream.batch() == {}
    cluster.ends[Q[0]] = 9
    assert stream.batch() == {a(0): (5, 9)}
    assert stream.batch() == {}
    assert stream.reader.reportLatestOffset() == {"orders": {"broker-a": {"0": 9, "1": 7}}}


def test_stream_starts_at_the_beginning() -> None:
    cluster = FakeCluster({Q[0]: 5, Q[1]: 7})
    cluster.first = {Q[0]: 2}
    stream = Stream(cluster, startingOffsets="earliest")
    assert stream.batch() == {a(0): (2, 5), a(1): (0, 7)}
    assert stream.batch() == {}


@pytest.mark.parametrize("come", [0, 4])
def test_repeated_first_batch_is_the_same(come: int) -> None:
    cluster = FakeCluster({Q[0]: 5})
    stream = Stream(cluster)
    start = stream.reader.initialOffset()
    cluster.ends[Q[0]] += come
    end = stream.reader.latestOffset(start, ALL)
    cluster.ends[Q[0]] = 100
    again = Stream(cluster)
    assert again.reader.initialOffset() == {"orders": {"broker-a": {"0": 100}}}
    parts = again.parts(again.reader.initialOffset(), end)
    assert parts == ({a(0): (5, 9)} if come else {})
    again.at = end
    assert again.batch() == {a(0): (5 + come, 100)}


def test_repeated_first_batch_of_late_topics_is_the_same() -> None:
    cluster = FakeCluster({})
    stream = Stream(cluster)
    start = stream.reader.initialOffset()
    cluster.ends[Q[0]] = 5
    end = stream.reader.latestOffset(start, ALL)
    again = Stream(cluster)
    assert again.parts(again.reader.initialOffset(), end) == {a(0): (0, 5)}


def test_repeated_batch_with_an_expired_new_queue_is_a_loss() -> None:
    cluster = FakeCluster({Q[0]: 5})
    stream = Stream(cluster)
    stream.batch()
    start = stream.at
    assert start is not None
    cluster.ends[Q[1]] = 3
    assert stream.batch() == {a(1): (0, 3)}
    assert stream.at is not None
    cluster.first[Q[1]] = 2
    with pytest.raises(DataLost, match="offsets 0 to 1 are missing, the first offset is 2"):
        Stream(cluster).parts(start, stream.at)
    assert Stream(cluster, failOnDataLoss="false").parts(start, stream.at) == {a(1): (2, 3)}
    assert stream.batch() == {}


def test_new_queues_are_read_from_their_first_message() -> None:
    cluster = FakeCluster({Q[0]: 5})
    stream = Stream(cluster)
    stream.batch()
    cluster.ends[Q[1]] = 3
    cluster.ends[Q[2]] = 0
    cluster.first[Q[1]] = 1
    assert stream.batch() == {a(1): (1, 3)}
    cluster.ends[Q[2]] = 2
    assert stream.batch() == {a(2): (0, 2)}


def test_empty_new_queue_makes_no_batch() -> None:
    cluster = FakeCluster({Q[0]: 5})
    stream = Stream(cluster)
    stream.batch()
    cluster.ends[Q[1]] = 0
    before = stream.at
    assert stream.batch() == {}
    assert stream.at == before


def test_new_queue_of_an_unavailable_broker_waits() -> None:
    cluster = FakeCluster({Q[0]: 5})
    stream = Stream(cluster)
    stream.batch()
    cluster.ends |= {Q[0]: 6, B: 3}
    cluster.unavailable = {B}
    assert stream.batch() == {a(0): (5, 6)}
    cluster.unavailable = set()
    assert stream.batch() == {("broker-b", 0): (0, 3)}


def test_row_limits() -> None:
    cluster = FakeCluster({Q[0]: 30, Q[1]: 10})
    stream = Stream(cluster, startingOffsets="earliest", maxOffsetsPerTrigger="20")
    assert stream.reader.getDefaultReadLimit() == ReadMaxRows(20)
    assert stream.batch() == {a(0): (0, 15), a(1): (0, 5)}
    assert stream.batch(ReadMaxRows(4)) == {a(0): (15, 18), a(1): (5, 6)}
    assert stream.batch(ALL) == {a(0): (18, 30), a(1): (6, 10)}
    cluster.ends[Q[0]] = 40
    with pytest.raises(BadSetting, match="ReadMaxBytes"):
        stream.batch(ReadMaxBytes(5))


def test_few_messages_wait_for_more_or_the_trigger_delay() -> None:
    cluster = FakeCluster({Q[0]: 2})
    stream = Stream(
        cluster, startingOffsets="earliest", minOffsetsPerTrigger="10", maxTriggerDelay="1m"
    )
    assert stream.reader.getDefaultReadLimit() == ReadMinRows(10)
    assert stream.batch() == {a(0): (0, 2)}
    cluster.ends[Q[0]] = 11
    assert stream.batch() == {}
    cluster.ends[Q[0]] = 12
    assert stream.batch() == {a(0): (2, 12)}
    cluster.ends[Q[0]] = 13
    assert stream.batch() == {}
    stream.clock.advance(60_000)
    assert stream.batch() == {a(0): (12, 13)}


def test_minimum_and_maximum_of_rows() -> None:
    cluster = FakeCluster({Q[0]: 50})
    stream = Stream(
        cluster, startingOffsets="earliest", minOffsetsPerTrigger="5", maxOffsetsPerTrigger="48"
    )
    assert stream.batch() == {a(0): (0, 48)}
    assert stream.batch() == {}
    cluster.ends[Q[0]] = 53
    assert stream.batch() == {a(0): (48, 53)}


def test_available_now_ends_at_the_fixed_offsets() -> None:
    cluster = FakeCluster({Q[0]: 10})
    stream = Stream(cluster, now=True, startingOffsets="earliest", maxOffsetsPerTrigger="6")
    cluster.ends |= {Q[0]: 20, Q[1]: 5}
    assert stream.batch() == {a(0): (0, 6)}
    assert stream.batch() == {a(0): (6, 10)}
    assert stream.batch() == {}


def test_available_now_from_the_end_reads_nothing() -> None:
    cluster = FakeCluster({Q[0]: 10})
    stream = Stream(cluster, now=True)
    cluster.ends[Q[0]] = 20
    assert stream.batch() == {}


def test_available_now_waits_for_known_brokers() -> None:
    cluster = FakeCluster({Q[0]: 10})
    stream = Stream(cluster, now=True)
    stream.at = {"orders": {"broker-a": {"0": 10}, "broker-b": {"0": 3}}}
    cluster.unavailable = {B}
    with pytest.raises(ReadGaveUp):
        stream.batch()
    cluster.unavailable = set()
    cluster.ends[B] = 5
    assert stream.batch() == {("broker-b", 0): (3, 5)}


def test_available_now_waits_for_the_broker_of_a_new_queue() -> None:
    cluster = FakeCluster({Q[0]: 10, B: 5})
    stream = Stream(cluster, now=True)
    stream.at = {"orders": {"broker-a": {"0": 10}}}
    cluster.unavailable = {B}
    with pytest.raises(ReadGaveUp):
        stream.batch()
    cluster.unavailable = set()
    assert stream.batch() == {("broker-b", 0): (0, 5)}
    assert stream.batch() == {}


@pytest.mark.parametrize("is_back", [False, True])
def test_available_now_with_a_lagging_replica_is_not_a_loss(is_back: bool) -> None:
    cluster = FakeCluster({Q[0]: 3, Q[1]: 9})
    cluster.replicas = {Q[0]}
    stream = Stream(cluster, now=True)
    stream.at = {"orders": {"broker-a": {"0": 5, "1": 7}}}
    if is_back:
        cluster.replicas = set()
        cluster.ends[Q[0]] = 6
    assert stream.batch() == {a(1): (7, 9), **({a(0): (5, 6)} if is_back else {})}
    assert stream.batch() == {}


def test_unavailable_broker_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    cluster = FakeCluster({Q[0]: 5, B: 5})
    stream = Stream(cluster)
    stream.batch()
    cluster.unavailable = {B}
    del cluster.ends[B]
    for _ in range(3):
        stream.batch()
    assert stream.at is not None
    asked = cluster.deleted_queries
    for _ in range(10):
        stream.reader.latestOffset(stream.at, ALL)
    assert cluster.deleted_queries == asked
    assert len([r for r in caplog.records if "keep their offsets" in r.message]) == 1
    cluster.unavailable = set()
    cluster.ends[B] = 5
    stream.batch()
    cluster.unavailable = {B}
    stream.batch()
    assert len([r for r in caplog.records if "keep their offsets" in r.message]) == 2


def test_queues_of_an_unavailable_broker_keep_their_offsets() -> None:
    cluster = FakeCluster({Q[0]: 5, B: 5})
    stream = Stream(cluster)
    stream.batch()
    cluster.unavailable = {B}
    cluster.ends |= {Q[0]: 6, B: 9}
    assert stream.batch() == {a(0): (5, 6)}
    del cluster.ends[B]  # the NameServers forget it too
    cluster.ends[Q[0]] = 7
    assert stream.batch() == {a(0): (6, 7)}
    assert stream.at is not None
    assert stream.at["orders"]["broker-b"] == {"0": 5}
    cluster.unavailable = set()
    cluster.ends[B] = 9
    assert stream.batch() == {("broker-b", 0): (5, 9)}


def test_unavailable_nameservers_do_not_end_a_stream() -> None:
    cluster = FakeCluster({Q[0]: 5})
    stream = Stream(cluster)
    stream.batch()
    cluster.nameservers_down = True
    cluster.ends[Q[0]] = 6
    assert stream.batch() == {a(0): (5, 6)}


def test_lagging_replica_is_not_a_loss() -> None:
    cluster = FakeCluster({Q[0]: 5})
    stream = Stream(cluster)
    stream.batch()
    cluster.replicas = {Q[0]}
    cluster.ends[Q[0]] = 3
    assert stream.batch() == {}
    cluster.ends[Q[0]] = 8
    assert stream.batch() == {a(0): (5, 8)}


def test_shrunk_queue_is_a_loss() -> None:
    cluster = FakeCluster({Q[0]: 50, Q[1]: 7})
    strict, lenient = Stream(cluster), Stream(cluster, failOnDataLoss="false")
    strict.batch()
    lenient.batch()
    cluster.ends[Q[0]] = 10
    cluster.first[Q[0]] = 1
    with pytest.raises(DataLost, match=r"orders, queue 0 at broker-a: .* 50 but now ends at 10"):
        strict.batch()
    assert lenient.batch(ReadMaxRows(4)) == {a(0): (1, 5)}
    assert lenient.batch() == {a(0): (5, 10)}
    assert lenient.batch() == {}


def test_shrunk_queue_does_not_wait_for_more() -> None:
    """Otherwise the loss would be reported again with each request of Spark."""
    cluster = FakeCluster({Q[0]: 50})
    stream = Stream(cluster, failOnDataLoss="false", minOffsetsPerTrigger="10")
    stream.batch()
    cluster.ends[Q[0]] = 3
    assert stream.batch() == {a(0): (0, 3)}


def test_recreated_empty_queue_is_a_loss() -> None:
    cluster = FakeCluster({Q[0]: 50})
    stream = Stream(cluster, failOnDataLoss="false")
    stream.batch()
    cluster.ends[Q[0]] = 0
    assert stream.batch() == {}
    cluster.ends[Q[0]] = 60
    assert stream.batch() == {a(0): (0, 60)}


def test_deleted_topic_is_a_loss() -> None:
    cluster = FakeCluster({Q[0]: 50, B: 5})
    strict, lenient = Stream(cluster), Stream(cluster, failOnDataLoss="false")
    strict.batch()
    lenient.batch()
    del cluster.ends[Q[0]]
    cluster.deleted = {Q[0]}
    cluster.ends[B] = 6
    with pytest.raises(DataLost, match="queue 0 at broker-a: it was read up to offset 50"):
        strict.batch()
    assert lenient.batch() == {("broker-b", 0): (5, 6)}
    assert lenient.at is not None
    assert lenient.at["orders"]["broker-a"] == {"0": 50}


def test_deselected_topic_keeps_its_offset() -> None:
    cluster = FakeCluster({Q[0]: 50})
    stream = Stream(cluster)
    bills = {"broker-a": {"0": 7}}
    stream.at = {"bills": bills, "orders": {"broker-a": {"0": 40}}}
    cluster.deleted = {MessageQueue("bills", "broker-a", 0)}
    assert stream.batch() == {a(0): (40, 50)}
    assert stream.at["bills"] == bills


def test_messages_deleted_before_they_were_read_are_a_loss() -> None:
    cluster = FakeCluster({Q[0]: 5})
    strict, lenient = Stream(cluster), Stream(cluster, failOnDataLoss="false")
    strict.batch()
    lenient.batch()
    cluster.ends[Q[0]] = 20
    cluster.first[Q[0]] = 8
    with pytest.raises(DataLost, match="offsets 5 to 7 are missing, the first offset is 8"):
        strict.batch()
    assert lenient.batch() == {a(0): (8, 20)}


def test_repeated_batch_with_a_truncated_end_is_a_loss() -> None:
    cluster = FakeCluster({Q[0]: 20})
    stream = Stream(cluster)
    start, end = {"orders": {"broker-a": {"0": 5}}}, {"orders": {"broker-a": {"0": 30}}}
    with pytest.raises(DataLost, match="offsets 20 to 29 are missing, the queue ends at 20"):
        stream.parts(start, end)
    cluster.replicas = {Q[0]}
    assert stream.parts(start, end) == {a(0): (5, 30)}


def test_repeated_batch_of_a_deleted_topic_is_a_loss() -> None:
    """The NameServers have no route: only the broker can report that the topic is deleted."""
    cluster = FakeCluster({B: 20})
    cluster.unavailable = cluster.deleted = {Q[0]}
    start = {"orders": {"broker-a": {"0": 5}, "broker-b": {"0": 5}}}
    end = {"orders": {"broker-a": {"0": 30}, "broker-b": {"0": 20}}}
    with pytest.raises(DataLost, match="queue 0 at broker-a: offsets 5 to 29 are missing"):
        Stream(cluster).parts(start, end)
    lenient = Stream(cluster, failOnDataLoss="false")
    assert lenient.parts(start, end) == {("broker-b", 0): (5, 20)}


def test_offsets_of_a_deleted_queue_are_not_committed() -> None:
    cluster = FakeCluster({Q[0]: 5})
    cluster.deleted = {B}
    stream = Stream(cluster, commitGroup="billing", failOnDataLoss="false")
    stream.at = {"orders": {"broker-a": {"0": 5}, "broker-b": {"0": 3}}}
    for _ in range(3):
        stream.batch()
    assert cluster.commits == [{Q[0], B}]


def test_offsets_are_committed_for_the_group() -> None:
    cluster = FakeCluster({Q[0]: 5, B: 5})
    stream = Stream(cluster, commitGroup="billing")
    stream.batch()
    assert cluster.stored == {Q[0]: 5, B: 5}
    cluster.ends |= {Q[0]: 9, B: 9}
    stream.batch()
    cluster.unavailable = {B}
    stream.batch()
    assert cluster.stored == {Q[0]: 9, B: 5}
    cluster.unavailable = set()
    assert stream.at is not None
    stream.reader.commit(stream.at)
    assert cluster.stored == {Q[0]: 9, B: 9}


def test_queues_are_refreshed_once_per_interval() -> None:
    cluster = FakeCluster({Q[0]: 5})
    stream = Stream(cluster)
    stream.batch()
    asked = cluster.asked
    assert stream.at is not None
    for _ in range(10):
        stream.reader.latestOffset(stream.at, ALL)
    assert cluster.asked == asked
