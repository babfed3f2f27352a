"""Statistics: counters by topic and group over the last minute, hour and day.

Stored messages are counted in the queues (`puts`, `put_bytes`) by the send path and summed here
when sampled; delivered messages are counted here, once per pull.

A window is a series of samples at equal intervals; its value is the difference between the last and
the first one. All counters are sampled at the same times, so the times are stored once, with
numbers. A counter stores a sample, with its number, only if the counter has changed. There may be
100,000 counters, so a round over all of them runs in steps; its samples are valid when it is
complete.

| window | a sample every | samples |
|---|---|---|
| minute | 10 s | 7 |
| hour | 10 min | 7 |
| day | 1 h | 25 |

The broker's totals are also sampled every second, for averages over 10, 60 and 600 s.
"""

from collections import deque
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Final

from penstock.broker.flow_counters import (
    NUMBER,
    NUMS,
    SECOND_MS,
    SIZE,
    TIMES,
    WINDOWS,
    Deliveries,
    FlowCounter,
)
from penstock.store.store import MessageStore
from penstock.store.tables.config_tables import TopicTable
from penstock.wire.bodies.admin_bodies import BrokerStatsData, BrokerStatsItem
from penstock.wire.codes import is_system_topic

RATE_SECONDS = (10, 60, 600)
STEP_COUNTERS = 1_000
"""Counters of queues and groups that are sampled in one step: 1 to 4 ms."""

_END: Final = object()
_PUTS, _FOUND, _MISSED, _TRANSFERRED = 1, 2, 3, 4  # columns of a second's sample, after its time


class Stats:
    """The statistics of a broker."""

    def __init__(self, store: MessageStore, table: TopicTable, now_ms: int) -> None:
        self._store = store
        self._table = table
        self.topics: dict[str, FlowCounter] = {}
        self.groups: dict[tuple[str, str], FlowCounter] = {}  # by (topic, group)
        self.backs: dict[tuple[str, str], FlowCounter] = {}  # messages that consumers sent back
        self.acks: dict[tuple[str, str], FlowCounter] = {}  # acknowledged POP messages
        self.batches: dict[tuple[str, str], FlowCounter] = {}  # POP responses with messages
        self._flows = {
            "SNDBCK_PUT_NUMS": self.backs,
            "GROUP_ACK_NUMS": self.acks,
            "GROUP_CK_NUMS": self.batches,
        }
        self._topics_of: dict[str, dict[str, None]] = {}  # by group
        self._times = [deque([now_ms], maxlen=kept) for _, kept in WINDOWS]
        self._numbers = [0] * len(WINDOWS)  # number of the last sample of each window
        self._round: Iterator[None] | None = None
        self._next_ms = [now_ms + step for step, _ in WINDOWS]
        self._broker_in = FlowCounter()
        self._user_in = FlowCounter()  # without system topics
        self.delivered = Deliveries()
        # The system topics of the store when it had `_counted_topics` topics.
        self._system_topics: list[bytes] = []
        self._counted_topics = 0
        self._missed = 0
        self._seconds: deque[tuple[int, ...]] = deque(maxlen=RATE_SECONDS[-1] + 1)
        self._second_ms = now_ms + SECOND_MS
        self._midnight_ms = _next_midnight_ms(now_ms)
        self._midnight_totals = (0, 0, 0, 0)  # stored yesterday, today; delivered yesterday, today

    def got(self, group: str, topic: str, count: int, size: int, behind_ms: int) -> None:
        """Count a pull that found messages; `behind_ms` is the age of the first one."""
        flow = self.deliveries_to(group, topic)
        self.delivered.count(flow, count, size, behind_ms)

    def deliveries_to(self, group: str, topic: str) -> FlowCounter:
        """The counter of messages delivered to a group, for `delivered.count`; until it is
        `dropped`."""
        flow = self.groups.get((topic, group))
        if flow is None:
            flow = self._add(self.groups, topic, group)
            flow.internal = is_system_topic(topic)
        return flow

    def missed(self) -> None:
        """Count a pull that found nothing."""
        self._missed += 1

    def sent_back(self, group: str, topic: str) -> None:
        """Count a message that a consumer sent back."""
        self._count(self.backs, topic, group, 1)

    def acked(self, group: str, topic: str, count: int) -> None:
        """Count acknowledged POP messages."""
        self._count(self.acks, topic, group, count)

    def popped(self, group: str, topic: str) -> None:
        """Count the messages of a queue in a POP response."""
        self._count(self.batches, topic, group, 1)

    def forget_group(self, group: str) -> Iterator[None]:
        """Remove the counters of a deleted group, one topic after another."""
        for topic in list(self._topics_of.get(group, ())):
            self._forget(topic, group)
            yield

    def view(self, name: str, key: str) -> BrokerStatsData | None:
        """The windows of a counter by RocketMQ's name, e.g. TOPIC_PUT_NUMS.

        The key is a topic, or `topic@group` for counters of groups; for BROKER_… it is ignored.
        """
        flow = self._flow(name, key)
        if flow is None and name.startswith("TOPIC_PUT_") and self._is_new(key):
            return BrokerStatsData()
        if flow is None:
            return None
        field = SIZE if name.endswith("_SIZE") else NUMS
        minute, hour, day = (self._snapshot(flow, window, field) for window in range(len(WINDOWS)))
        return BrokerStatsData(stats_minute=minute, stats_hour=hour, stats_day=day)

    def put_tps(self, topic: str) -> float:
        """Messages per second stored in a topic in the last minute."""
        flow = self.topics.get(topic)
        return self._snapshot(flow, 0, NUMS).tps if flow is not None else 0.0

    def get_tps(self, group: str, topic: str) -> float:
        """Messages per second of a topic delivered to a group in the last minute."""
        flow = self.groups.get((topic, group))
        return self._snapshot(flow, 0, NUMS).tps if flow is not None else 0.0

    def runtime(self) -> dict[str, str]:
        """The fields of GET_BROKER_RUNTIME_INFO that are counted here."""
        self._count_totals()
        puts, put_bytes = self._store.writer.puts, self._store.writer.put_bytes
        put_yesterday, put_today, got_yesterday, got_today = self._midnight_totals
        counters = {
            "putMessageTimesTotal": puts,
            "putMessageSizeTotal": put_bytes,
            "putMessageFailedTimes": self._store.writer.failed_puts,
            "putMessageAverageSize": put_bytes / puts if puts else 0.0,
            "msgPutTotalYesterdayMorning": put_yesterday,
            "msgPutTotalTodayMorning": put_today,
            "msgPutTotalTodayNow": self._user_in.nums,
            "msgGetTotalYesterdayMorning": got_yesterday,
            "msgGetTotalTodayMorning": got_today,
            "msgGetTotalTodayNow": self.delivered.user.nums,
        }
        total = (
            sum(self._rate(column, s) or 0.0 for column in (_FOUND, _MISSED)) for s in RATE_SECONDS
        )
        return {
            **{name: str(value) for name, value in counters.items()},
            "putTps": self._rates(_PUTS),
            "getFoundTps": self._rates(_FOUND),
            "getMissTps": self._rates(_MISSED),
            "getTotalTps": " ".join(str(rate) for rate in total),
            "getTransferredTps": self._rates(_TRANSFERRED),
        }

    def due(self) -> int:
        """When `tick` has something to do: now, while a round has steps left."""
        return self._second_ms if self._round is None else 0

    def tick(self, now_ms: int) -> None:
        """Take the samples that are due, one step at a time."""
        delivered = self.delivered
        if now_ms >= self._second_ms or now_ms + SECOND_MS < self._second_ms:
            # The second case: the clock was set back, and sampling must go on.
            self._second_ms = now_ms + SECOND_MS
            self._seconds.append(
                (now_ms, self._store.writer.puts, delivered.pulls, self._missed, delivered.all.nums)
            )
        if now_ms >= self._midnight_ms:
            self._count_totals()
            self._midnight_ms = _next_midnight_ms(now_ms)
            _, put_today, _, got_today = self._midnight_totals
            self._midnight_totals = (put_today, self._user_in.nums, got_today, delivered.user.nums)
        if self._round is None:
            windows = self._due_windows(now_ms)
            self._round = self._sample_all(windows, now_ms) if windows else None
        if self._round is not None and next(self._round, _END) is _END:
            self._round = None

    def _due_windows(self, now_ms: int) -> list[int]:
        """The windows with a sample due; their next samples are scheduled."""
        due = []
        for window, (step_ms, _) in enumerate(WINDOWS):
            if now_ms >= self._next_ms[window] or now_ms + step_ms < self._next_ms[window]:
                self._next_ms[window] = now_ms + step_ms
                due.append(window)
        return due

    def _sample_all(self, windows: list[int], now_ms: int) -> Iterator[None]:
        """A round, step by step. Counters of deleted topics are removed."""
        self._count_totals()
        for flow in (self._broker_in, self.delivered.all, self._user_in, self.delivered.user):
            for window in windows:
                flow.sample(window, self._numbers[window] + 1)
        yield from self._sample_topics(windows)
        yield from self._sample_groups(windows)
        for window in windows:
            self._times[window].append(now_ms)
            self._numbers[window] += 1

    def _sample_topics(self, windows: list[int]) -> Iterator[None]:
        stored = self._store.queues.topics
        done = 0
        for name in list(stored):
            queues = list(stored.get(name, {}).values())
            nums = size = 0
            for begin in range(0, len(queues), STEP_COUNTERS):
                part = queues[begin : begin + STEP_COUNTERS]
                nums += sum([queue.puts for queue in part])
                size += sum([queue.put_bytes for queue in part])
                if len(part) == STEP_COUNTERS:
                    yield
            topic = name.decode("utf-8", "replace")
            if nums == 0 or self._table.get(topic) is None:
                self.topics.pop(topic, None)
            else:
                flow = self.topics.get(topic)
                if flow is None or nums < flow.nums:  # fewer: deleted and created again
                    flow = self.topics[topic] = FlowCounter()
                flow.nums = flow.times = nums
                flow.size = size
                self._sample_changes(flow, windows)
            done += len(queues) % STEP_COUNTERS + 1
            if done >= STEP_COUNTERS:
                done = 0
                yield
        for topic in [topic for topic in self.topics if topic.encode() not in stored]:
            del self.topics[topic]

    def _sample_groups(self, windows: list[int]) -> Iterator[None]:
        for done, ((topic, group), flow) in enumerate(list(self.groups.items())):
            if self._table.get(topic) is None:
                self._forget(topic, group)
            else:
                self._sample_changes(flow, windows)
            if done % STEP_COUNTERS == STEP_COUNTERS - 1:
                yield
        for flows in self._flows.values():
            for done, (key, flow) in enumerate(list(flows.items())):
                if self._table.get(key[0]) is None:
                    self._forget(*key)
                else:
                    self._sample_changes(flow, windows)
                if done % STEP_COUNTERS == STEP_COUNTERS - 1:
                    yield

    def _count(
        self, flows: dict[tuple[str, str], FlowCounter], topic: str, group: str, count: int
    ) -> None:
        flow = flows.get((topic, group))
        if flow is None:
            flow = self._add(flows, topic, group)
        flow.nums += count
        flow.times += 1

    def _add(
        self, flows: dict[tuple[str, str], FlowCounter], topic: str, group: str
    ) -> FlowCounter:
        flow = flows[topic, group] = FlowCounter()
        self._topics_of.setdefault(group, {})[topic] = None
        return flow

    def _forget(self, topic: str, group: str) -> None:
        """Remove the counters of a group on a topic."""
        for flows in (self.groups, *self._flows.values()):
            flow = flows.pop((topic, group), None)
            if flow is not None:
                flow.dropped = True
        topics = self._topics_of.get(group)
        if topics is not None and topics.pop(topic, 0) is None and not topics:
            del self._topics_of[group]

    def _sample_changes(self, flow: FlowCounter, windows: list[int]) -> None:
        for window in windows:
            if flow.has_changed(window):
                flow.sample(window, self._numbers[window] + 1)

    def _count_totals(self) -> None:
        stored = self._store.queues.topics
        if len(stored) != self._counted_topics:
            self._counted_topics = len(stored)
            self._system_topics = [
                name for name in stored if is_system_topic(name.decode("utf-8", "replace"))
            ]
        system = sum(
            queue.puts for name in self._system_topics for queue in stored.get(name, {}).values()
        )
        self._broker_in.nums = self._store.writer.puts
        self._user_in.nums = self._store.writer.puts - system

    def _flow(self, name: str, key: str) -> FlowCounter | None:
        if name in ("TOPIC_PUT_NUMS", "TOPIC_PUT_SIZE"):
            return self.topics.get(key)
        if name in ("GROUP_GET_NUMS", "GROUP_GET_SIZE"):
            topic, _, group = key.rpartition("@")
            return self.groups.get((topic, group))
        if name in self._flows:
            topic, _, group = key.rpartition("@")
            return self._flows[name].get((topic, group))
        return {
            "BROKER_PUT_NUMS": self._broker_in,
            "BROKER_GET_NUMS": self.delivered.all,
            "BROKER_PUT_NUMS_WITHOUT_SYSTEM_TOPIC": self._user_in,
            "BROKER_GET_NUMS_WITHOUT_SYSTEM_TOPIC": self.delivered.user,
        }.get(name)

    def _is_new(self, topic: str) -> bool:
        """Whether the topic has messages that are in no sample yet."""
        queues = self._store.queues.topics.get(topic.encode(), {})
        return any(queue.puts for queue in queues.values())

    def _snapshot(self, flow: FlowCounter, window: int, field: int) -> BrokerStatsItem:
        row, last = flow.samples[window], self._numbers[window]
        if not row or row[NUMBER] >= last:  # only samples of a round that is not complete
            return BrokerStatsItem()
        first = max(last - WINDOWS[window][1] + 1, row[NUMBER])
        times_ms = self._times[window]
        elapsed_ms = times_ms[-1] - times_ms[first - last - 1]
        begin, end = flow.position_of(window, first), flow.position_of(window, last)
        total = row[end + field] - row[begin + field]
        times = row[end + TIMES] - row[begin + TIMES]
        return BrokerStatsItem(
            sum=total,
            tps=total * 1000 / elapsed_ms if elapsed_ms > 0 else 0.0,
            avgpt=total / times if times > 0 else 0.0,
        )

    def _rate(self, column: int, seconds: int) -> float | None:
        """The average over the last seconds; None if there are not enough samples."""
        if len(self._seconds) <= seconds:
            return None
        first, last = self._seconds[-seconds - 1], self._seconds[-1]
        elapsed_ms = last[0] - first[0]
        return (last[column] - first[column]) * 1000 / elapsed_ms if elapsed_ms > 0 else 0.0

    def _rates(self, column: int) -> str:
        """Averages as tools expect them: separated by spaces, empty if unknown."""
        rates = (self._rate(column, seconds) for seconds in RATE_SECONDS)
        return " ".join("" if rate is None else str(rate) for rate in rates)


def _next_midnight_ms(now_ms: int) -> int:
    today = datetime.fromtimestamp(now_ms // 1000).replace(hour=0, minute=0, second=0)
    return int((today + timedelta(days=1)).timestamp()) * 1000
