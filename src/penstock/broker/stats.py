"""What went through: counters by topic and group over the last minute, hour and day.

Messages in are counted on the queue rows (`puts`, `put_bytes`) by the send path and summed here
when sampled; messages out are counted here, once per pull.

A window is a row of samples taken at equal steps; what it tells is the difference of its last and
first one. All counters are sampled at the same moments, so the moments are kept once, and numbered.
A counter notes the numbers of those samples only where it had changed. As there may be 100,000 of
them the round over all is made in steps; its samples count when it is complete.

| window | a sample every | samples |
|---|---|---|
| minute | 10 s | 7 |
| hour | 10 min | 7 |
| day | 1 h | 25 |

Besides, the broker's totals are sampled every second for averages over 10, 60 and 600 s.
"""

from array import array
from collections import deque
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Final

from penstock.store.store import MessageStore
from penstock.store.tables import TopicTable
from penstock.wire.bodies.admin_bodies import BrokerStatsData, BrokerStatsItem
from penstock.wire.codes import is_system_topic

SECOND_MS = 1_000
WINDOWS = ((10 * SECOND_MS, 7), (600 * SECOND_MS, 7), (3_600 * SECOND_MS, 25))
"""(step, samples kept) of minute, hour and day."""
RATE_SECONDS = (10, 60, 600)
STEP_COUNTERS = 1_000
"""How many counters of queues and groups are looked at in one step: 1 to 4 ms."""

_NUMBER, _NUMS, _SIZE, _TIMES = 0, 1, 2, 3  # fields of a note
_FIELDS = 4
_OVER: Final = object()
_PUTS, _FOUND, _MISSED, _TRANSFERRED = 1, 2, 3, 4  # columns of a second's sample, after its time


class Flow:
    """Messages, bytes and requests that went one way, with their notes for each window."""

    __slots__ = ("behind_ms", "nums", "samples", "size", "times")

    def __init__(self) -> None:
        self.nums = 0
        self.size = 0
        self.times = 0
        self.behind_ms = 0  # a group's: how old the last message was that it got
        self.samples = tuple(array("q") for _ in WINDOWS)

    def has_changed(self, window: int) -> bool:
        """Whether there is something to note; each change counts as a request."""
        row = self.samples[window]
        return self.times != (row[-1] if row else 0)

    def note(self, window: int, number: int) -> None:
        """Note how it stands at the sample of this number."""
        row = self.samples[window]
        if not row:
            row.extend((number - 1, 0, 0, 0))  # it began after that sample, so it was zero then
        row.extend((number, self.nums, self.size, self.times))
        oldest = number - WINDOWS[window][1]  # needed until this round is complete
        while row[_FIELDS] <= oldest:  # the note before says nothing any more
            del row[:_FIELDS]

    def place_of(self, window: int, number: int) -> int:
        """Where the note begins that tells of a sample: this one, or the last before it."""
        row = self.samples[window]
        place = len(row) - _FIELDS
        while row[place] > number:
            place -= _FIELDS
        return place


class Stats:
    """Counters and their samples."""

    def __init__(self, store: MessageStore, table: TopicTable, now_ms: int) -> None:
        self._store = store
        self._table = table
        self.topics: dict[str, Flow] = {}
        self.groups: dict[tuple[str, str], Flow] = {}  # by (topic, group)
        self.backs: dict[tuple[str, str], Flow] = {}  # messages handed back, likewise
        self.acks: dict[tuple[str, str], Flow] = {}  # popped messages acknowledged
        self.batches: dict[tuple[str, str], Flow] = {}  # batches that were popped
        self._flows = {
            "SNDBCK_PUT_NUMS": self.backs,
            "GROUP_ACK_NUMS": self.acks,
            "GROUP_CK_NUMS": self.batches,
        }
        self._topics_of: dict[str, dict[str, None]] = {}  # by group
        self._moments = [deque([now_ms], maxlen=kept) for _, kept in WINDOWS]
        self._numbers = [0] * len(WINDOWS)  # of the last moments
        self._round: Iterator[None] | None = None
        self._next_ms = [now_ms + step for step, _ in WINDOWS]
        self._broker_in = Flow()
        self._broker_out = Flow()
        self._user_in = Flow()  # without system topics
        self._user_out = Flow()
        self._found = 0
        self._missed = 0
        self._seconds: deque[tuple[int, ...]] = deque(maxlen=RATE_SECONDS[-1] + 1)
        self._second_ms = now_ms + SECOND_MS
        self._midnight_ms = _next_midnight_ms(now_ms)
        self._mornings = (0, 0, 0, 0)  # put yesterday, put today, got yesterday, got today

    def got(self, group: str, topic: str, count: int, size: int, behind_ms: int) -> None:
        """A pull has given so many messages and bytes; the last was stored so long ago."""
        flow = self.groups.get((topic, group))
        if flow is None:
            flow = self.groups[topic, group] = Flow()
            self._topics_of.setdefault(group, {})[topic] = None
        flow.nums += count
        flow.size += size
        flow.times += 1
        flow.behind_ms = behind_ms
        self._found += 1
        self._broker_out.nums += count
        if not is_system_topic(topic):
            self._user_out.nums += count

    def missed(self) -> None:
        """A pull has found nothing."""
        self._missed += 1

    def sent_back(self, group: str, topic: str) -> None:
        """A consumer has handed back a message that it could not handle."""
        _count(self.backs, (topic, group), 1)

    def acked(self, group: str, topic: str, count: int) -> None:
        """A consumer has acknowledged so many popped messages."""
        _count(self.acks, (topic, group), count)

    def popped(self, group: str, topic: str) -> None:
        """A batch of messages was popped."""
        _count(self.batches, (topic, group), 1)

    def forget_group(self, group: str) -> None:
        """The group is deleted."""
        for topic in self._topics_of.pop(group, ()):
            del self.groups[topic, group]
        for flows in self._flows.values():
            for key in [key for key in flows if key[1] == group]:
                del flows[key]

    def view(self, name: str, key: str) -> BrokerStatsData | None:
        """RocketMQ's windows of a counter, e.g. TOPIC_PUT_NUMS of a topic.

        The key of a group is `topic@group`; the key of BROKER_… is not looked at.
        """
        flow = self._flow(name, key)
        if flow is None and name.startswith("TOPIC_PUT_") and self._is_new(key):
            return BrokerStatsData()
        if flow is None:
            return None
        field = _SIZE if name.endswith("_SIZE") else _NUMS
        minute, hour, day = (self._snapshot(flow, window, field) for window in range(len(WINDOWS)))
        return BrokerStatsData(stats_minute=minute, stats_hour=hour, stats_day=day)

    def put_tps(self, topic: str) -> float:
        """Messages per second that came in for a topic in the last minute."""
        flow = self.topics.get(topic)
        return self._snapshot(flow, 0, _NUMS).tps if flow is not None else 0.0

    def get_tps(self, group: str, topic: str) -> float:
        """Messages per second that a group got of a topic in the last minute."""
        flow = self.groups.get((topic, group))
        return self._snapshot(flow, 0, _NUMS).tps if flow is not None else 0.0

    def runtime(self) -> dict[str, str]:
        """The figures of GET_BROKER_RUNTIME_INFO that are counted here."""
        self._count_totals()
        puts, put_bytes = self._store.writer.puts, self._store.writer.put_bytes
        put_yesterday, put_today, got_yesterday, got_today = self._mornings
        figures = {
            "putMessageTimesTotal": puts,
            "putMessageSizeTotal": put_bytes,
            "putMessageAverageSize": put_bytes / puts if puts else 0.0,
            "msgPutTotalYesterdayMorning": put_yesterday,
            "msgPutTotalTodayMorning": put_today,
            "msgPutTotalTodayNow": self._user_in.nums,
            "msgGetTotalYesterdayMorning": got_yesterday,
            "msgGetTotalTodayMorning": got_today,
            "msgGetTotalTodayNow": self._user_out.nums,
        }
        total = (
            sum(self._rate(column, s) or 0.0 for column in (_FOUND, _MISSED)) for s in RATE_SECONDS
        )
        return {
            **{name: str(figure) for name, figure in figures.items()},
            "putTps": self._rates(_PUTS),
            "getFoundTps": self._rates(_FOUND),
            "getMissTps": self._rates(_MISSED),
            "getTotalTps": " ".join(str(rate) for rate in total),
            "getTransferredTps": self._rates(_TRANSFERRED),
        }

    def due(self) -> int:
        """When `tick` has something to do: at once, while there are steps left."""
        return self._second_ms if self._round is None else 0

    def tick(self, now_ms: int) -> None:
        """Take the samples that are due, or a step of that."""
        if now_ms >= self._second_ms or now_ms + SECOND_MS < self._second_ms:
            # The second case: the clock was set back, and must not stop us until it caught up.
            self._second_ms = now_ms + SECOND_MS
            self._seconds.append(
                (now_ms, self._store.writer.puts, self._found, self._missed, self._broker_out.nums)
            )
        if now_ms >= self._midnight_ms:
            self._count_totals()
            self._midnight_ms = _next_midnight_ms(now_ms)
            _, put_today, _, got_today = self._mornings
            self._mornings = (put_today, self._user_in.nums, got_today, self._user_out.nums)
        if self._round is None:
            windows = self._due_windows(now_ms)
            self._round = self._sample_all(windows, now_ms) if windows else None
        if self._round is not None and next(self._round, _OVER) is _OVER:
            self._round = None

    def _due_windows(self, now_ms: int) -> list[int]:
        """The windows of which a sample is due; their next ones are set."""
        due = []
        for window, (step_ms, _) in enumerate(WINDOWS):
            if now_ms >= self._next_ms[window] or now_ms + step_ms < self._next_ms[window]:
                self._next_ms[window] = now_ms + step_ms
                due.append(window)
        return due

    def _sample_all(self, windows: list[int], now_ms: int) -> Iterator[None]:
        """A round, step by step. What belongs to topics that are gone is forgotten."""
        self._count_totals()
        for flow in (self._broker_in, self._broker_out, self._user_in, self._user_out):
            for window in windows:
                flow.note(window, self._numbers[window] + 1)
        yield from self._sample_topics(windows)
        yield from self._sample_groups(windows)
        for window in windows:
            self._moments[window].append(now_ms)
            self._numbers[window] += 1

    def _sample_topics(self, windows: list[int]) -> Iterator[None]:
        stored = self._store.queues.topics
        done = 0
        for name in list(stored):
            queues = stored.get(name, {}).values()
            nums = sum([queue.puts for queue in queues])
            topic = name.decode("utf-8", "replace")
            if nums == 0 or self._table.get(topic) is None:
                self.topics.pop(topic, None)
            else:
                flow = self.topics.get(topic)
                if flow is None or nums < flow.nums:  # fewer: deleted and made again
                    flow = self.topics[topic] = Flow()
                flow.nums = flow.times = nums
                flow.size = sum([queue.put_bytes for queue in queues])
                self._note_changes(flow, windows)
            done += len(queues) + 1
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
                self._note_changes(flow, windows)
            if done % STEP_COUNTERS == STEP_COUNTERS - 1:
                yield
        for flows in self._flows.values():
            for done, (key, flow) in enumerate(list(flows.items())):
                if self._table.get(key[0]) is None:
                    flows.pop(key, None)
                else:
                    self._note_changes(flow, windows)
                if done % STEP_COUNTERS == STEP_COUNTERS - 1:
                    yield

    def _forget(self, topic: str, group: str) -> None:
        if self.groups.pop((topic, group), None) is not None:
            del self._topics_of[group][topic]
            if not self._topics_of[group]:
                del self._topics_of[group]

    def _note_changes(self, flow: Flow, windows: list[int]) -> None:
        for window in windows:
            if flow.has_changed(window):
                flow.note(window, self._numbers[window] + 1)

    def _count_totals(self) -> None:
        stored = self._store.queues.topics
        system = sum(
            queue.puts
            for name, queues in stored.items()
            if is_system_topic(name.decode("utf-8", "replace"))
            for queue in queues.values()
        )
        self._broker_in.nums = self._store.writer.puts
        self._user_in.nums = self._store.writer.puts - system

    def _flow(self, name: str, key: str) -> Flow | None:
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
            "BROKER_GET_NUMS": self._broker_out,
            "BROKER_PUT_NUMS_WITHOUT_SYSTEM_TOPIC": self._user_in,
            "BROKER_GET_NUMS_WITHOUT_SYSTEM_TOPIC": self._user_out,
        }.get(name)

    def _is_new(self, topic: str) -> bool:
        """Whether the topic has got messages that no sample has counted yet."""
        queues = self._store.queues.topics.get(topic.encode(), {})
        return any(queue.puts for queue in queues.values())

    def _snapshot(self, flow: Flow, window: int, field: int) -> BrokerStatsItem:
        row, last = flow.samples[window], self._numbers[window]
        if not row or row[_NUMBER] >= last:  # what a round has noted that is not complete
            return BrokerStatsItem()
        first = max(last - WINDOWS[window][1] + 1, row[_NUMBER])
        moments = self._moments[window]
        elapsed_ms = moments[-1] - moments[first - last - 1]
        begin, end = flow.place_of(window, first), flow.place_of(window, last)
        total = row[end + field] - row[begin + field]
        times = row[end + _TIMES] - row[begin + _TIMES]
        return BrokerStatsItem(
            sum=total,
            tps=total * 1000 / elapsed_ms if elapsed_ms > 0 else 0.0,
            avgpt=total / times if times > 0 else 0.0,
        )

    def _rate(self, column: int, seconds: int) -> float | None:
        """The average over the last seconds; None before so many have passed."""
        if len(self._seconds) <= seconds:
            return None
        first, last = self._seconds[-seconds - 1], self._seconds[-1]
        elapsed_ms = last[0] - first[0]
        return (last[column] - first[column]) * 1000 / elapsed_ms if elapsed_ms > 0 else 0.0

    def _rates(self, column: int) -> str:
        """Averages as tools expect them: separated by blanks, those not known yet left out."""
        rates = (self._rate(column, seconds) for seconds in RATE_SECONDS)
        return " ".join("" if rate is None else str(rate) for rate in rates)


def _count(flows: dict[tuple[str, str], Flow], key: tuple[str, str], count: int) -> None:
    flow = flows.get(key)
    if flow is None:
        flow = flows[key] = Flow()
    flow.nums += count
    flow.times += 1


def _next_midnight_ms(now_ms: int) -> int:
    today = datetime.fromtimestamp(now_ms // 1000).replace(hour=0, minute=0, second=0)
    return int((today + timedelta(days=1)).timestamp()) * 1000
