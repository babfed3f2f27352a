"""Asking producers about halves that wait too long (CHECK_TRANSACTION_STATE).

A half is left in peace at first (`transaction_timeout_ms`, or the time it asks for itself). Then a
live producer of its group is asked, one connection after the other in turn, every
`transaction_check_ms`. The answer is an END_TRANSACTION of its own.

Counted is a check that a producer answered with "unknown", or did not answer before the next one
was due although its connection stood. What was counted is in the store when the half is asked about
next: its record is appended once more, with the count. After `transaction_checks_max` of them the
half is given up. A group without live producers is not asked, and nothing is counted; its halves
wait as long as the log keeps messages (`retain_hours`), then they are given up as well.

The work is bounded: so many halves are read at a time, by the pool, and so many checks of one
connection may wait for an answer, because RocketMQ's clients take them one by one. When half of
them are answered the next ones are asked.
"""

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from heapq import heapify, heappop, heappush
from typing import Final, NamedTuple

from penstock.broker.consumers.clients import Member
from penstock.broker.context import BrokerContext
from penstock.broker.transaction.half_messages import (
    ASKED,
    CLOSED,
    DOOMED,
    READY,
    RESTING,
    Half,
    HalfRecord,
    Halves,
    ProducerGroup,
    read_half,
    with_checks,
)
from penstock.broker.transaction.half_queues import NEVER, POLL_MS, RETRY_MS, HalfLog
from penstock.broker.transaction.resolution import Endings
from penstock.errors import PenstockError
from penstock.metrics import Registry
from penstock.rpc.answers import NotifyClient, TickAt
from penstock.store.put import ILLEGAL, PUT_OK
from penstock.wire.codes import (
    PROPERTY_REAL_QUEUE_ID,
    TOPIC_TRANS_HALF,
    RequestCode,
)
from penstock.wire.message import encode_properties
from penstock.wire.message_ids import encode_offset_id
from penstock.wire.record import RECORD, Record, StoredRecord

log = logging.getLogger(__name__)

JOB_HALVES_MAX: Final = 64
JOB_BYTES_MAX: Final = 1024 * 1024
"""Halves that are read at once: at least one, however long it is."""
DUE_MAX: Final = 1_000
"""Halves that become due before others have their turn."""
ASKED_MAX: Final = 256
"""Checks of one connection that may wait for an answer: Java clients queue 2,000 and answer one
after the other, and those that wait there longer than `transaction_check_ms` would count."""
ROLL_AFTER: Final = 100_000
ROLL_RATIO: Final = 4
"""A half is appended again, uncounted, when so many others were stored behind it, and so many times
as many as there are open ones: the next start reads the queue from the first open half on."""
COME_BACK_MS: Final = 60_000
"""How long a half waits for a producer at least, however old it is: clients beat their hearts every
30 s, and find a broker again that was restarted."""
_I32_MAX: Final = (1 << 31) - 1
_STALE_LEAST: Final = 64
_STALE_DUE_LEAST: Final = 1024
_UNREADABLE: Final = b""

Deed = Callable[[Half, bytes | None, int], None]


class Job(NamedTuple):
    """Halves whose records are read by the pool, and what is done with each."""

    deeds: list[tuple[Half, Deed]]
    reading: "Future[list[bytes | None]]"


class CheckBack:
    """The checks of a broker."""

    def __init__(
        self,
        context: BrokerContext,
        halves: Halves,
        half_log: HalfLog,
        endings: Endings,
        host: bytes,
    ) -> None:
        self._context = context
        self._halves = halves
        self._log = half_log
        self._endings = endings
        self._host = host
        self._due: list[tuple[int, int, Half]] = []  # by time; outdated ones too
        self._doomed: deque[Half] = deque()
        self._connected: dict[str, set[int]] = {}  # producers by group, as this tick finds them
        self._job: Job | None = None
        self._record = Record(_I32_MAX)
        self._turn = 0
        self._refused = False
        self.sent = 0
        self.unknown = 0  # counted

    # --- halves that come and go

    def admit(self, record: HalfRecord) -> Half | None:
        """Take up a half; None if it was known."""
        half = self._halves.admit(record, self._log.origin_of(record))
        if half is not None:
            self.schedule(half, record)
        return half

    def schedule(self, half: Half, record: HalfRecord) -> None:
        """See to it that a half is checked in time."""
        settings = self._context.settings.current
        due_ms = half.since_ms + record.immunity_ms(settings)
        if half.checks > 0:
            due_ms = max(due_ms, record.store_ms + settings.broker.transaction_check_ms)
        self._rest(half, due_ms)

    def answered(self, half: Half, now_ms: int) -> None:
        """The producer that was asked does not know."""
        if half.state == ASKED:
            half.group.asked -= 1
            half.state = RESTING
            self._count(half, now_ms)

    def postpone(self, half: Half) -> None:
        """What the producer answered could not be stored: ask again later, without counting."""
        if half.state == ASKED:
            half.group.asked -= 1
            half.state = RESTING

    def go_on(self, group: ProducerGroup, now_ms: int) -> None:
        """An answer has come: ask about more halves if that has to wait for answers no longer."""
        if group.asked <= group.goes_on_at:
            group.goes_on_at = -1
            self._context.effects.put(TickAt(now_ms))

    def reset(self, half: Half, now_ms: int) -> None:
        """Count from the beginning, and ask soon."""
        half.checks = 0
        if half.state in (RESTING, DOOMED):
            self._make_ready(half, now_ms)

    def without_producer(self) -> int:
        """How many halves wait for a check and have nobody to be asked."""
        clients = self._context.clients
        return sum(
            sum(half.state == READY for half in group.ready)
            for group in list(self._halves.groups.values())
            if group.ready and not clients.producers(group.name)
        )

    def add_metrics(self, registry: Registry) -> None:
        registry.gauge(
            "penstock_halves_without_producer",
            "Open halves that are to be checked and whose group has no live producer.",
            read=self.without_producer,
        )
        registry.counter(
            "penstock_transaction_checks_total",
            "Checks that were sent to producers.",
            read=lambda: self.sent,
        )
        registry.counter(
            "penstock_transaction_checks_unknown_total",
            "Checks that were answered unknown, or not in time.",
            read=lambda: self.unknown,
        )

    # --- time

    def tick(self, now_ms: int) -> int:
        """Do what is due; when there is more to do."""
        self._connected.clear()
        left = DUE_MAX
        while self._due and self._due[0][0] <= now_ms and left > 0:
            due_ms, _, half = heappop(self._due)
            left -= 1
            if half.state != CLOSED and half.due_ms == due_ms:
                self._become_due(half, now_ms)
        next_ms = self._work(now_ms)
        return min(next_ms, self._due[0][0] if self._due else NEVER)

    def _become_due(self, half: Half, now_ms: int) -> None:
        """The time of a half has come, whatever it was waiting for."""
        if half.state == ASKED:
            half.group.asked -= 1
            if half.asked in self._connections(half.group):
                self._count(half, now_ms)  # it had time enough
            if half.state != DOOMED:
                self._make_ready(half, now_ms)
        elif half.state == RESTING:
            if half.checks >= self._context.settings.current.broker.transaction_checks_max:
                self._doom(half, now_ms)
            else:
                self._make_ready(half, now_ms)
        elif half.state == READY:
            if self._connections(half.group):
                self._set_due(
                    half, now_ms + self._context.settings.current.broker.transaction_check_ms
                )
            else:
                self._doom(half, now_ms)

    def _count(self, half: Half, now_ms: int) -> None:
        half.checks += 1
        self.unknown += 1
        if half.checks >= self._context.settings.current.broker.transaction_checks_max:
            self._doom(half, now_ms)

    def _rest(self, half: Half, due_ms: int) -> None:
        half.state = RESTING
        self._set_due(half, due_ms)

    def _make_ready(self, half: Half, now_ms: int) -> None:
        """Let a half be asked about as soon as there is somebody; give it up if there never is."""
        half.state = READY
        ready = half.group.ready
        ready.append(half)
        if len(ready) > 2 * half.group.halves + _STALE_LEAST:
            half.group.ready = deque(one for one in ready if one.state == READY)
        retain_ms = self._context.settings.current.store.retain_hours * 3_600_000
        self._set_due(half, max(half.since_ms + retain_ms, now_ms + COME_BACK_MS))

    def _doom(self, half: Half, now_ms: int) -> None:
        half.state = DOOMED
        half.due_ms = NEVER
        self._doomed.append(half)
        self._context.effects.put(TickAt(now_ms))

    def _set_due(self, half: Half, due_ms: int) -> None:
        half.due_ms = due_ms
        heappush(self._due, (due_ms, half.first, half))
        if len(self._due) > 4 * len(self._halves.open) + _STALE_DUE_LEAST:
            # A half that was asked about and has ended would stay for days.
            self._due = [
                (ms, first, one)
                for ms, first, one in self._due
                if one.state != CLOSED and one.due_ms == ms
            ]
            heapify(self._due)

    def _connections(self, group: ProducerGroup) -> set[int]:
        found = self._connected.get(group.name)
        if found is None:
            members = self._context.clients.producers(group.name)
            found = self._connected[group.name] = {member.client for member in members}
        return found

    # --- what needs the record of a half

    def _work(self, now_ms: int) -> int:
        """Read halves and do what is to be done; when to look again."""
        for _ in range(2):  # what is in memory is done at once
            if self._job is None:
                deeds = self._choose()
                if not deeds:
                    return NEVER
                self._job = Job(deeds, self._read([half for half, _ in deeds]))
            job = self._job
            if not job.reading.done():
                return now_ms + POLL_MS
            self._job = None
            done = [
                self._do(half, deed, data, now_ms)
                for (half, deed), data in zip(job.deeds, job.reading.result(), strict=True)
            ]
            if not all(done):
                return now_ms + RETRY_MS
        return now_ms

    def _read(self, halves: list[Half]) -> "Future[list[bytes | None]]":
        store, places = self._context.store, [half.place for half in halves]
        handed = store.log.handed

        def read(place: int) -> bytes | None:
            try:
                return store.lookup.record(place, handed)
            except (PenstockError, OSError) as error:
                log.error("the half at the log offset %d can't be read: %s", place, error)
                return _UNREADABLE

        return store.disk.submit(lambda: [read(place) for place in places])

    def _choose(self) -> list[tuple[Half, Deed]]:
        """Which halves are read next: those to be given up, to be asked about, to be moved."""
        deeds: list[tuple[Half, Deed]] = []
        space = JOB_BYTES_MAX
        while self._doomed and len(deeds) < JOB_HALVES_MAX and space > 0:
            half = self._doomed.popleft()
            if half.state == DOOMED:
                deeds.append((half, self._give_up))
                space -= half.size
        groups = [group for group in self._halves.groups.values() if group.ready]
        self._turn += 1
        for number in range(len(groups)):
            group = groups[(self._turn + number) % len(groups)]
            may_ask = ASKED_MAX * len(self._connections(group)) - group.asked
            while group.ready and may_ask > 0 and len(deeds) < JOB_HALVES_MAX and space > 0:
                half = group.ready.popleft()
                if half.state == READY:
                    deeds.append((half, self._ask))
                    space -= half.size
                    may_ask -= 1
            group.goes_on_at = -1
            if group.ready and may_ask <= 0:
                group.goes_on_at = ASKED_MAX * len(self._connections(group)) // 2
        chosen = {half for half, _ in deeds}
        for half in self._far_behind():
            if len(deeds) < JOB_HALVES_MAX and space > 0 and half not in chosen:
                deeds.append((half, self._move_on))
                space -= half.size
        return deeds

    def _far_behind(self) -> list[Half]:
        """Halves that hold up how much of the queue is done with."""
        queue = self._log.queue
        if queue is None:
            return []
        far = queue.max_offset - max(ROLL_AFTER, ROLL_RATIO * len(self._halves.open))
        if self._log.done_to() >= far:
            return []
        return [
            half
            for half in self._halves.oldest_ones(JOB_HALVES_MAX)
            if half.newest < far and half.state != DOOMED and not half.fixed
        ]

    def _do(self, half: Half, deed: Deed, data: bytes | None, now_ms: int) -> bool:
        """Do what is to be done with a half; False if that has to wait."""
        if half.state == CLOSED:
            return True
        if data == _UNREADABLE:  # the others must not wait for it
            half.fixed = True
            if half.state in (READY, DOOMED):
                interval_ms = self._context.settings.current.broker.transaction_check_ms
                self._rest(half, now_ms + interval_ms)
            return False
        try:
            deed(half, data, now_ms)
            self._refused = False
            return True
        except PenstockError as error:
            if not self._refused:
                log.error("checks of halves have to wait: %s", error)
            self._refused = True
            if half.state == DOOMED:
                self._doomed.append(half)
            elif half.state == READY:
                half.group.ready.append(half)
            return False

    def _give_up(self, half: Half, data: bytes | None, now_ms: int) -> None:
        if half.state == DOOMED:
            self._endings.give_up(half, data, now_ms)

    def _move_on(self, half: Half, data: bytes | None, now_ms: int) -> None:
        """Append a half once more that holds up others."""
        if data is None:
            self._let_go(half, now_ms)
        else:
            self._move(half, data, now_ms)

    def _let_go(self, half: Half, now_ms: int) -> None:
        """The record of a half is gone."""
        if half.state == ASKED:
            half.group.asked -= 1
        self._doom(half, now_ms)

    def _move(self, half: Half, data: bytes, now_ms: int) -> None:
        """Store what was counted, unless the record has no room for that."""
        status = self._log.append_again(half, data, now_ms)
        if status == ILLEGAL:
            half.fixed = True
        elif status != PUT_OK:
            raise self._context.rewriter.fault(status)

    def _ask(self, half: Half, data: bytes | None, now_ms: int) -> None:
        """Ask a producer about a half; what was counted before is stored first."""
        if half.state != READY:
            return
        members = self._context.clients.producers(half.group.name)
        if not members:
            half.group.ready.append(half)
            return
        if data is None:
            self._let_go(half, now_ms)
            return
        if half.checks > half.noted:
            self._move(half, data, now_ms)
        half.group.turn += 1
        member = members[half.group.turn % len(members)]
        self._tell(half, member, data)
        half.state, half.asked = ASKED, member.client
        half.group.asked += 1
        interval_ms = self._context.settings.current.broker.transaction_check_ms
        self._set_due(half, now_ms + interval_ms)

    def _tell(self, half: Half, member: Member, data: bytes) -> None:
        record = read_half(data)
        assert record is not None, "it was read as a half before"
        port = int.from_bytes(self._host[-4:], "big")
        ext = {
            "topic": TOPIC_TRANS_HALF,
            "tranStateTableOffset": str(half.newest),
            "commitLogOffset": str(half.place),
            "msgId": record.key,
            "transactionId": record.key,
            "offsetMsgId": encode_offset_id(self._host[:-4], port, half.place),
            "bname": self._context.settings.current.broker.name,
        }
        body = self._shown(half, record, data)
        code = RequestCode.CHECK_TRANSACTION_STATE
        self._context.effects.put(
            NotifyClient(member.client, code, {k: v for k, v in ext.items() if v}, body)
        )
        self.sent += 1

    def _shown(self, half: Half, record: HalfRecord, data: bytes) -> bytes:
        """The half as its producer sent it: with its own topic and queue."""
        stored, shown = StoredRecord(), self._record
        stored.bind(memoryview(bytearray(data)))
        found = stored.read(0, len(data))
        assert found == RECORD
        properties = with_checks(record.properties, half.checks + 1)
        body = data[stored.body_at : stored.body_at + stored.body_length]
        shown.fill(record.topic.encode(), body, encode_properties(properties))
        queue_id = record.properties.get(PROPERTY_REAL_QUEUE_ID, "")
        shown.queue_id = int(queue_id) if queue_id.isascii() and queue_id.isdigit() else 0
        shown.flag, shown.sys_flag = stored.flag, stored.sys_flag
        shown.born_ms = stored.born_ms
        shown.born_host = data[48 : 48 + stored.born_host_length]
        shown.store_host = self._host
        shown.reconsume_times = stored.reconsume_times
        shown.prepare()
        target = bytearray(shown.size)
        shown.put(memoryview(target), 0, half.newest, half.place, stored.store_ms)
        shown.release()
        return bytes(target)
