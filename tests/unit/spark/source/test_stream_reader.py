"""The stream over topics, call by call as Spark makes them, over a cluster that is made up."""

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

from penstock.errors import BadSetting, DataLost, NoNameServer, PeerUnreachable, ReadGaveUp
from penstock.spark.cluster_metadata import QueriedOffsets
from penstock.spark.source.data_source import DefaultSource
from penstock.spark.source.queue_offsets import QueueOffsets
from penstock.spark.source.source_options import SourceOptions, TopicSelection
from penstock.spark.source.stream_reader import LOOK_MS, TopicStreamReader
from penstock.testing.clock import VirtualClock
from penstock.wire.bodies.client_bodies import MessageQueue

Q = [MessageQueue("orders", "broker-a", n) for n in range(8)]
B = MessageQueue("orders", "broker-b", 0)
ALL = ReadAllAvailable()
Json = dict[str, Any]


class MadeUp:
    """Queues with their ends; some away, gone, or known by a replica only."""

    def __init__(self, ends: dict[MessageQueue, int]) -> None:
        self.there = dict(ends)
        self.first: dict[MessageQueue, int] = {}
        self.away: set[MessageQueue] = set()
        self.lost: set[MessageQueue] = set()
        self.replicas: set[MessageQueue] = set()
        self.names_away = False
        self.stored: dict[MessageQueue, int] = {}
        self.asked = 0
        self.asked_gone = 0
        self.commits: list[set[MessageQueue]] = []

    def queues(self, topics: TopicSelection) -> set[MessageQueue]:
        self.asked += 1
        if self.names_away:
            raise NoNameServer("no NameServer answers")
        return set(self.there)

    all_queues = required_queues = queues

    def max_offsets(self, queues: Iterable[MessageQueue]) -> QueriedOffsets:
        return self._of(queues, self.there)

    def min_offsets(self, queues: Iterable[MessageQueue]) -> QueriedOffsets:
        return self._of(queues, self.first)

    def _of(self, queues: Iterable[MessageQueue], table: QueueOffsets) -> QueriedOffsets:
        ends = QueriedOffsets(from_replica=frozenset(self.replicas))
        for queue in queues:
            if queue in self.away:
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
        self.asked_gone += 1
        return set(queues) & self.lost

    def commit_offsets(self, group: str, marks: QueueOffsets) -> dict[MessageQueue, int]:
        self.commits.append(set(marks))
        done = {q: n for q, n in marks.items() if q not in self.away | self.lost}
        self.stored.update(done)
        return done


class Stream:
    """Spark's part: asks for batches, keeps the offsets, and has each batch read."""

    def __init__(self, cluster: MadeUp, *, now: bool = False, **options: str) -> None:
        given = SourceOptions.of({"subscribe": "orders", **options}, stream=True)
        schema = DefaultSource({}).schema()
        self.reader = TopicStreamReader(given, schema)
        self.clock = self.reader._clock = VirtualClock()
        self.reader._open = cluster  # type: ignore[assignment]
        self.cluster = cluster
        self.at: Json | None = None
        if now:
            self.reader.prepareForTriggerAvailableNow()

    def batch(self, limit: ReadLimit | None = None) -> dict[tuple[str, int], tuple[int, int]]:
        """What the next batch reads: by broker and queue; nothing if there is none."""
        self.clock.advance(LOOK_MS)
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


def test_from_the_end_on() -> None:
    cluster = MadeUp({Q[0]: 5, Q[1]: 7})
    stream = Stream(cluster)
    assert stream.batch() == {}
    cluster.there[Q[0]] = 9
    assert stream.batch() == {a(0): (5, 9)}
    assert stream.batch() == {}
    assert stream.reader.reportLatestOffset() == {"orders": {"broker-a": {"0": 9, "1": 7}}}


def test_from_the_beginning() -> None:
    cluster = MadeUp({Q[0]: 5, Q[1]: 7})
    cluster.first = {Q[0]: 2}
    stream = Stream(cluster, startingOffsets="earliest")
    assert stream.batch() == {a(0): (2, 5), a(1): (0, 7)}
    assert stream.batch() == {}


@pytest.mark.parametrize("come", [0, 4])
def test_the_first_batch_is_the_same_when_it_is_run_again(come: int) -> None:
    cluster = MadeUp({Q[0]: 5})
    stream = Stream(cluster)
    start = stream.reader.initialOffset()
    cluster.there[Q[0]] += come
    end = stream.reader.latestOffset(start, ALL)
    cluster.there[Q[0]] = 100
    again = Stream(cluster)
    assert again.reader.initialOffset() == {"orders": {"broker-a": {"0": 100}}}
    parts = again.parts(again.reader.initialOffset(), end)
    assert parts == ({a(0): (5, 9)} if come else {})
    again.at = end
    assert again.batch() == {a(0): (5 + come, 100)}


def test_a_first_batch_of_topics_that_came_late_is_the_same_when_it_is_run_again() -> None:
    cluster = MadeUp({})
    stream = Stream(cluster)
    start = stream.reader.initialOffset()
    cluster.there[Q[0]] = 5
    end = stream.reader.latestOffset(start, ALL)
    again = Stream(cluster)
    assert again.parts(again.reader.initialOffset(), end) == {a(0): (0, 5)}


def test_a_new_queue_in_a_batch_that_is_run_again_after_its_first_messages_expired() -> None:
    cluster = MadeUp({Q[0]: 5})
    stream = Stream(cluster)
    stream.batch()
    start = stream.at
    assert start is not None
    cluster.there[Q[1]] = 3
    assert stream.batch() == {a(1): (0, 3)}
    assert stream.at is not None
    cluster.first[Q[1]] = 2
    with pytest.raises(DataLost, match="offsets 0 to 1 are not there, the first there is 2"):
        Stream(cluster).parts(start, stream.at)
    assert Stream(cluster, failOnDataLoss="false").parts(start, stream.at) == {a(1): (2, 3)}
    assert stream.batch() == {}


def test_new_queues_are_read_from_their_first_message() -> None:
    cluster = MadeUp({Q[0]: 5})
    stream = Stream(cluster)
    stream.batch()
    cluster.there[Q[1]] = 3
    cluster.there[Q[2]] = 0
    cluster.first[Q[1]] = 1
    assert stream.batch() == {a(1): (1, 3)}
    cluster.there[Q[2]] = 2
    assert stream.batch() == {a(2): (0, 2)}


def test_an_empty_new_queue_makes_no_batch() -> None:
    cluster = MadeUp({Q[0]: 5})
    stream = Stream(cluster)
    stream.batch()
    cluster.there[Q[1]] = 0
    before = stream.at
    assert stream.batch() == {}
    assert stream.at == before


def test_a_new_queue_whose_broker_is_away_waits() -> None:
    cluster = MadeUp({Q[0]: 5})
    stream = Stream(cluster)
    stream.batch()
    cluster.there |= {Q[0]: 6, B: 3}
    cluster.away = {B}
    assert stream.batch() == {a(0): (5, 6)}
    cluster.away = set()
    assert stream.batch() == {("broker-b", 0): (0, 3)}


def test_limits() -> None:
    cluster = MadeUp({Q[0]: 30, Q[1]: 10})
    stream = Stream(cluster, startingOffsets="earliest", maxOffsetsPerTrigger="20")
    assert stream.reader.getDefaultReadLimit() == ReadMaxRows(20)
    assert stream.batch() == {a(0): (0, 15), a(1): (0, 5)}
    assert stream.batch(ReadMaxRows(4)) == {a(0): (15, 18), a(1): (5, 6)}
    assert stream.batch(ALL) == {a(0): (18, 30), a(1): (6, 10)}
    cluster.there[Q[0]] = 40
    with pytest.raises(BadSetting, match="ReadMaxBytes"):
        stream.batch(ReadMaxBytes(5))


def test_few_messages_wait_for_more_or_for_the_delay() -> None:
    cluster = MadeUp({Q[0]: 2})
    stream = Stream(
        cluster, startingOffsets="earliest", minOffsetsPerTrigger="10", maxTriggerDelay="1m"
    )
    assert stream.reader.getDefaultReadLimit() == ReadMinRows(10)
    assert stream.batch() == {a(0): (0, 2)}
    cluster.there[Q[0]] = 11
    assert stream.batch() == {}
    cluster.there[Q[0]] = 12
    assert stream.batch() == {a(0): (2, 12)}
    cluster.there[Q[0]] = 13
    assert stream.batch() == {}
    stream.clock.advance(60_000)
    assert stream.batch() == {a(0): (12, 13)}


def test_at_least_and_at_most() -> None:
    cluster = MadeUp({Q[0]: 50})
    stream = Stream(
        cluster, startingOffsets="earliest", minOffsetsPerTrigger="5", maxOffsetsPerTrigger="48"
    )
    assert stream.batch() == {a(0): (0, 48)}
    assert stream.batch() == {}
    cluster.there[Q[0]] = 53
    assert stream.batch() == {a(0): (48, 53)}


def test_a_run_to_a_fixed_end() -> None:
    cluster = MadeUp({Q[0]: 10})
    stream = Stream(cluster, now=True, startingOffsets="earliest", maxOffsetsPerTrigger="6")
    cluster.there |= {Q[0]: 20, Q[1]: 5}
    assert stream.batch() == {a(0): (0, 6)}
    assert stream.batch() == {a(0): (6, 10)}
    assert stream.batch() == {}


def test_a_run_to_a_fixed_end_from_the_end_reads_nothing() -> None:
    cluster = MadeUp({Q[0]: 10})
    stream = Stream(cluster, now=True)
    cluster.there[Q[0]] = 20
    assert stream.batch() == {}


def test_a_run_to_a_fixed_end_waits_for_brokers_that_it_knows() -> None:
    cluster = MadeUp({Q[0]: 10})
    stream = Stream(cluster, now=True)
    stream.at = {"orders": {"broker-a": {"0": 10}, "broker-b": {"0": 3}}}
    cluster.away = {B}
    with pytest.raises(ReadGaveUp):
        stream.batch()
    cluster.away = set()
    cluster.there[B] = 5
    assert stream.batch() == {("broker-b", 0): (3, 5)}


def test_a_run_to_a_fixed_end_waits_for_the_broker_of_a_new_queue() -> None:
    cluster = MadeUp({Q[0]: 10, B: 5})
    stream = Stream(cluster, now=True)
    stream.at = {"orders": {"broker-a": {"0": 10}}}
    cluster.away = {B}
    with pytest.raises(ReadGaveUp):
        stream.batch()
    cluster.away = set()
    assert stream.batch() == {("broker-b", 0): (0, 5)}
    assert stream.batch() == {}


@pytest.mark.parametrize("is_back", [False, True])
def test_a_run_to_a_fixed_end_by_a_replica_that_is_behind_is_no_loss(is_back: bool) -> None:
    cluster = MadeUp({Q[0]: 3, Q[1]: 9})
    cluster.replicas = {Q[0]}
    stream = Stream(cluster, now=True)
    stream.at = {"orders": {"broker-a": {"0": 5, "1": 7}}}
    if is_back:
        cluster.replicas = set()
        cluster.there[Q[0]] = 6
    assert stream.batch() == {a(1): (7, 9), **({a(0): (5, 6)} if is_back else {})}
    assert stream.batch() == {}


def test_a_broker_that_is_away_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    cluster = MadeUp({Q[0]: 5, B: 5})
    stream = Stream(cluster)
    stream.batch()
    cluster.away = {B}
    del cluster.there[B]
    for _ in range(3):
        stream.batch()
    assert stream.at is not None
    asked = cluster.asked_gone
    for _ in range(10):
        stream.reader.latestOffset(stream.at, ALL)
    assert cluster.asked_gone == asked
    assert len([r for r in caplog.records if "stay where they are" in r.message]) == 1
    cluster.away = set()
    cluster.there[B] = 5
    stream.batch()
    cluster.away = {B}
    stream.batch()
    assert len([r for r in caplog.records if "stay where they are" in r.message]) == 2


def test_queues_of_a_broker_that_is_away_stay_where_they_are() -> None:
    cluster = MadeUp({Q[0]: 5, B: 5})
    stream = Stream(cluster)
    stream.batch()
    cluster.away = {B}
    cluster.there |= {Q[0]: 6, B: 9}
    assert stream.batch() == {a(0): (5, 6)}
    del cluster.there[B]  # the NameServers forget it too
    cluster.there[Q[0]] = 7
    assert stream.batch() == {a(0): (6, 7)}
    assert stream.at is not None
    assert stream.at["orders"]["broker-b"] == {"0": 5}
    cluster.away = set()
    cluster.there[B] = 9
    assert stream.batch() == {("broker-b", 0): (5, 9)}


def test_nameservers_that_are_away_do_not_end_a_stream() -> None:
    cluster = MadeUp({Q[0]: 5})
    stream = Stream(cluster)
    stream.batch()
    cluster.names_away = True
    cluster.there[Q[0]] = 6
    assert stream.batch() == {a(0): (5, 6)}


def test_a_replica_that_is_behind_is_no_loss() -> None:
    cluster = MadeUp({Q[0]: 5})
    stream = Stream(cluster)
    stream.batch()
    cluster.replicas = {Q[0]}
    cluster.there[Q[0]] = 3
    assert stream.batch() == {}
    cluster.there[Q[0]] = 8
    assert stream.batch() == {a(0): (5, 8)}


def test_a_queue_that_went_back() -> None:
    cluster = MadeUp({Q[0]: 50, Q[1]: 7})
    strict, lenient = Stream(cluster), Stream(cluster, failOnDataLoss="false")
    strict.batch()
    lenient.batch()
    cluster.there[Q[0]] = 10
    cluster.first[Q[0]] = 1
    with pytest.raises(DataLost, match=r"orders, queue 0 at broker-a: .* 50 and ends at 10 now"):
        strict.batch()
    assert lenient.batch(ReadMaxRows(4)) == {a(0): (1, 5)}
    assert lenient.batch() == {a(0): (5, 10)}
    assert lenient.batch() == {}


def test_a_queue_that_went_back_does_not_wait_for_more() -> None:
    """Else the loss would be told anew each time that Spark asks."""
    cluster = MadeUp({Q[0]: 50})
    stream = Stream(cluster, failOnDataLoss="false", minOffsetsPerTrigger="10")
    stream.batch()
    cluster.there[Q[0]] = 3
    assert stream.batch() == {a(0): (0, 3)}


def test_a_queue_that_is_made_anew_and_empty() -> None:
    cluster = MadeUp({Q[0]: 50})
    stream = Stream(cluster, failOnDataLoss="false")
    stream.batch()
    cluster.there[Q[0]] = 0
    assert stream.batch() == {}
    cluster.there[Q[0]] = 60
    assert stream.batch() == {a(0): (0, 60)}


def test_a_topic_that_is_deleted() -> None:
    cluster = MadeUp({Q[0]: 50, B: 5})
    strict, lenient = Stream(cluster), Stream(cluster, failOnDataLoss="false")
    strict.batch()
    lenient.batch()
    del cluster.there[Q[0]]
    cluster.lost = {Q[0]}
    cluster.there[B] = 6
    with pytest.raises(DataLost, match="queue 0 at broker-a: it was read up to offset 50"):
        strict.batch()
    assert lenient.batch() == {("broker-b", 0): (5, 6)}
    assert lenient.at is not None
    assert lenient.at["orders"]["broker-a"] == {"0": 50}


def test_a_topic_that_is_not_read_any_more_stays_where_it_is() -> None:
    cluster = MadeUp({Q[0]: 50})
    stream = Stream(cluster)
    bills = {"broker-a": {"0": 7}}
    stream.at = {"bills": bills, "orders": {"broker-a": {"0": 40}}}
    cluster.lost = {MessageQueue("bills", "broker-a", 0)}
    assert stream.batch() == {a(0): (40, 50)}
    assert stream.at["bills"] == bills


def test_messages_that_expired_before_they_were_read() -> None:
    cluster = MadeUp({Q[0]: 5})
    strict, lenient = Stream(cluster), Stream(cluster, failOnDataLoss="false")
    strict.batch()
    lenient.batch()
    cluster.there[Q[0]] = 20
    cluster.first[Q[0]] = 8
    with pytest.raises(DataLost, match="offsets 5 to 7 are not there, the first there is 8"):
        strict.batch()
    assert lenient.batch() == {a(0): (8, 20)}


def test_a_batch_that_is_run_again_after_its_end_was_cut_off() -> None:
    cluster = MadeUp({Q[0]: 20})
    stream = Stream(cluster)
    start, end = {"orders": {"broker-a": {"0": 5}}}, {"orders": {"broker-a": {"0": 30}}}
    with pytest.raises(DataLost, match="offsets 20 to 29 are not there, the queue ends at 20"):
        stream.parts(start, end)
    cluster.replicas = {Q[0]}
    assert stream.parts(start, end) == {a(0): (5, 30)}


def test_a_batch_that_is_run_again_after_its_topic_was_deleted() -> None:
    """The NameServers do not know where it was: only its broker can say that it is gone."""
    cluster = MadeUp({B: 20})
    cluster.away = cluster.lost = {Q[0]}
    start = {"orders": {"broker-a": {"0": 5}, "broker-b": {"0": 5}}}
    end = {"orders": {"broker-a": {"0": 30}, "broker-b": {"0": 20}}}
    with pytest.raises(DataLost, match="queue 0 at broker-a: offsets 5 to 29 are not there"):
        Stream(cluster).parts(start, end)
    lenient = Stream(cluster, failOnDataLoss="false")
    assert lenient.parts(start, end) == {("broker-b", 0): (5, 20)}


def test_progress_of_a_queue_that_is_gone_is_not_stored_for_ever() -> None:
    cluster = MadeUp({Q[0]: 5})
    cluster.lost = {B}
    stream = Stream(cluster, commitGroup="billing", failOnDataLoss="false")
    stream.at = {"orders": {"broker-a": {"0": 5}, "broker-b": {"0": 3}}}
    for _ in range(3):
        stream.batch()
    assert cluster.commits == [{Q[0], B}]


def test_progress_for_a_group() -> None:
    cluster = MadeUp({Q[0]: 5, B: 5})
    stream = Stream(cluster, commitGroup="billing")
    stream.batch()
    assert cluster.stored == {Q[0]: 5, B: 5}
    cluster.there |= {Q[0]: 9, B: 9}
    stream.batch()
    cluster.away = {B}
    stream.batch()
    assert cluster.stored == {Q[0]: 9, B: 5}
    cluster.away = set()
    assert stream.at is not None
    stream.reader.commit(stream.at)
    assert cluster.stored == {Q[0]: 9, B: 9}


def test_it_is_not_looked_for_new_queues_all_the_time() -> None:
    cluster = MadeUp({Q[0]: 5})
    stream = Stream(cluster)
    stream.batch()
    asked = cluster.asked
    assert stream.at is not None
    for _ in range(10):
        stream.reader.latestOffset(stream.at, ALL)
    assert cluster.asked == asked
