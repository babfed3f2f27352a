"""Check-back: asks producers for the outcome of half messages (CHECK_TRANSACTION_STATE).

A half message is not checked for `transaction_timeout_ms`, or for its own immunity time. After that
the broker asks a connected producer of its group every `transaction_check_ms`, connection by
connection in round robin. The answer arrives as an END_TRANSACTION request. With access lists only
producers are asked whose users may publish to the topic of the half message.

A check counts if the producer answers "unknown", or if it does not answer before the next check is
due although it is still connected. The count is stored before the next check: the half message is
appended again with its number of checks. After `transaction_checks_max` counted checks it is
discarded. While no such producer is connected, no check is sent and none counts; after the
retention time (`retain_hours`) the half message is discarded.

The work is bounded: a limited number of half messages is read at a time in the thread pool, and a
limited number of checks per connection is in flight, because RocketMQ's clients answer them one
after another. When half of them are answered, more are sent.
"""

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from heapq import heapify, heappop, heappush
from typing import Final, NamedTuple

from penstock.broker.consumers.client_groups import GroupMember
from penstock.broker.context import BrokerContext
from penstock.broker.transaction.half_messages import (
    CHECKING,
    DISCARDING,
    READY,
    RESOLVED,
    WAITING,
    HalfMessage,
    HalfRecord,
    OpenHalfMessages,
    ProducerGroup,
    read_half,
    with_checks,
)
from penstock.broker.transaction.half_queues import NEVER, POLL_MS, RETRY_MS, HalfQueues
from penstock.broker.transaction.resolution import Resolution
from penstock.errors import PenstockError
from penstock.metrics import Registry
from penstock.rpc.answers import ClientId, NotifyClient, TickAt
from penstock.store.put import ILLEGAL, PUT_OK
from penstock.wire.codes import (
    PROPERTY_REAL_QUEUE_ID,
    TOPIC_TRANS_HALF,
    RequestCode,
)
from penstock.wire.java_numbers import parse_int
from penstock.wire.message import encode_properties
from penstock.wire.message_ids import encode_offset_id
from penstock.wire.record import RECORD, Record, StoredRecord

log = logging.getLogger(__name__)

READ_COUNT_MAX: Final = 64
READ_BYTES_MAX: Final = 1024 * 1024
"""Half messages that one job reads: at least one, whatever its size."""
DUE_MAX: Final = 1_000
"""Half messages whose due time one tick handles."""
CHECKS_IN_FLIGHT_MAX: Final = 256
"""Checks in flight per connection and, with access lists, topic. Java clients queue up to 2,000 and
answer them one by one; a check that waits there for longer than `transaction_check_ms` would
count."""
MOVE_AFTER: Final = 100_000
MOVE_RATIO: Final = 4
"""A half message is appended again, without counting a check, when this many others were stored
after it and `MOVE_RATIO` times as many as are open. The next start reads the queue from the oldest
open half message on, so this bounds what it reads."""
RECONNECT_MS: Final = 60_000
"""Minimum time that a half message waits for a producer, whatever its age: clients send heartbeats
every 30 s, so this lets them reconnect to a broker that was restarted."""
_I32_MAX: Final = (1 << 31) - 1
STALE_READY_MIN: Final = 64
STALE_DUE_MIN: Final = 1024
_UNREADABLE: Final = b""

Action = Callable[[HalfMessage, bytes | None, int], None]


class ReadJob(NamedTuple):
    """Half messages whose records are read in the thread pool, with the action for each."""

    actions: list[tuple[HalfMessage, Action]]
    reading: "Future[list[bytes | None]]"


class CheckBack:
    """Schedules and sends the check-backs of a broker."""

    def __init__(
        self,
        context: BrokerContext,
        half_messages: OpenHalfMessages,
        queues: HalfQueues,
        resolution: Resolution,
        host: bytes,
    ) -> None:
        self._context = context
        self._half_messages = half_messages
        self._queues = queues
        self._resolution = resolution
        self._host = host
        self._due: list[tuple[int, int, HalfMessage]] = []  # heap by due time; and stale entries
        self._to_discard: deque[HalfMessage] = deque()
        # Producers that may be asked, by connection; valid for one tick.
        self._connected: dict[ProducerGroup, dict[ClientId, GroupMember]] = {}
        self._job: ReadJob | None = None
        self._record = Record(_I32_MAX)
        self._round_robin = 0
        self._refused = False
        self.sent = 0
        self.unknown = 0  # checks that counted

    # --- half messages that are added and answered

    def add(self, record: HalfRecord, now_ms: int) -> HalfMessage | None:
        """Add a half message and schedule its first check; None if it was known already."""
        half = self._half_messages.add(record, self._queues.find_first_log_offset(record))
        if half is not None:
            self.schedule(half, record, now_ms)
        return half

    def schedule(self, half: HalfMessage, record: HalfRecord, now_ms: int) -> None:
        """Schedule the next check of a half message.

        Store times never step back, so they are ahead after the clock was; they count as now.
        """
        settings = self._context.settings.current
        half.first_store_ms = min(half.first_store_ms, now_ms)
        due_ms = half.first_store_ms + record.immunity_ms(settings)
        if half.checks > 0:
            store_ms = min(record.store_ms, now_ms)
            due_ms = max(due_ms, store_ms + settings.broker.transaction_check_ms)
        self._wait_until(half, due_ms)

    def clock_stepped(self, step_ms: int) -> None:
        """The clock was set: half messages wait as long as if it had not been."""
        for half in self._half_messages.open.values():
            half.first_store_ms += step_ms
            if half.due_ms < NEVER:
                half.due_ms += step_ms
        self._due = [
            (half.due_ms, half.first_offset, half)
            for half in self._half_messages.open.values()
            if half.due_ms < NEVER
        ]
        heapify(self._due)

    def on_unknown(self, half: HalfMessage, now_ms: int) -> None:
        """Count the answer "unknown" of a producer."""
        if half.state == CHECKING:
            half.group.in_flight -= 1
            half.state = WAITING
            self._count_check(half, now_ms)

    def postpone(self, half: HalfMessage) -> None:
        """Check again later without counting: the outcome could not be stored."""
        if half.state == CHECKING:
            half.group.in_flight -= 1
            half.state = WAITING

    def resume_checks(self, group: ProducerGroup, now_ms: int) -> None:
        """Wake the broker to send more checks, if enough of those in flight are answered."""
        if group.in_flight <= group.resume_at:
            group.resume_at = -1
            self._context.effects.put(TickAt(now_ms))

    def reset(self, half: HalfMessage, now_ms: int) -> None:
        """Reset the number of checks and check as soon as possible."""
        half.checks = 0
        if half.state in (WAITING, DISCARDING):
            self._make_ready(half, now_ms)

    def without_producer(self) -> int:
        """The number of half messages that are due for a check and have no connected producer."""
        return sum(
            sum(half.state == READY for half in group.ready)
            for group in list(self._half_messages.groups.values())
            if group.ready and not self._producers(group)
        )

    def add_metrics(self, registry: Registry) -> None:
        registry.gauge(
            "penstock_half_messages_without_producer",
            "Half messages that are due for a check while no producer of their group is connected.",
            read=self.without_producer,
        )
        registry.counter(
            "penstock_transaction_checks_total",
            "Check-backs that were sent to producers.",
            read=lambda: self.sent,
        )
        registry.counter(
            "penstock_transaction_checks_unknown_total",
            "Check-backs that were answered with unknown, or not in time.",
            read=lambda: self.unknown,
        )

    # --- time

    def tick(self, now_ms: int) -> int:
        """Handle what is due; returns when to be called again."""
        self._connected.clear()
        remaining = DUE_MAX
        while self._due and self._due[0][0] <= now_ms and remaining > 0:
            due_ms, _, half = heappop(self._due)
            remaining -= 1
            if half.state != RESOLVED and half.due_ms == due_ms:
                self._handle_due(half, now_ms)
        next_ms = self._run_jobs(now_ms)
        return min(next_ms, self._due[0][0] if self._due else NEVER)

    def _handle_due(self, half: HalfMessage, now_ms: int) -> None:
        """Take the next step for a half message whose time has come."""
        if half.state == CHECKING:
            half.group.in_flight -= 1
            if half.asked_client in self._connections(half.group):
                self._count_check(half, now_ms)  # connected, but gave no answer
            if half.state != DISCARDING:
                self._make_ready(half, now_ms)
        elif half.state == WAITING:
            if half.checks >= self._context.settings.current.broker.transaction_checks_max:
                self._mark_for_discard(half, now_ms)
            else:
                self._make_ready(half, now_ms)
        elif half.state == READY:
            if self._connections(half.group):
                self._set_due(
                    half, now_ms + self._context.settings.current.broker.transaction_check_ms
                )
            else:
                self._mark_for_discard(half, now_ms)

    def _count_check(self, half: HalfMessage, now_ms: int) -> None:
        half.checks += 1
        self.unknown += 1
        if half.checks >= self._context.settings.current.broker.transaction_checks_max:
            self._mark_for_discard(half, now_ms)

    def _wait_until(self, half: HalfMessage, due_ms: int) -> None:
        half.state = WAITING
        self._set_due(half, due_ms)

    def _make_ready(self, half: HalfMessage, now_ms: int) -> None:
        """Check it as soon as a producer is connected; discard it if none connects in time."""
        half.state = READY
        ready = half.group.ready
        ready.append(half)
        if len(ready) > 2 * half.group.open_count + STALE_READY_MIN:
            half.group.ready = deque(one for one in ready if one.state == READY)
        retain_ms = self._context.settings.current.store.retain_hours * 3_600_000
        self._set_due(half, max(half.first_store_ms + retain_ms, now_ms + RECONNECT_MS))

    def _mark_for_discard(self, half: HalfMessage, now_ms: int) -> None:
        half.state = DISCARDING
        half.due_ms = NEVER
        self._to_discard.append(half)
        self._context.effects.put(TickAt(now_ms))

    def _set_due(self, half: HalfMessage, due_ms: int) -> None:
        half.due_ms = due_ms
        heappush(self._due, (due_ms, half.first_offset, half))
        if len(self._due) > 4 * len(self._half_messages.open) + STALE_DUE_MIN:
            # The entry of a resolved half message would otherwise stay until its due time.
            self._due = [
                (ms, first_offset, one)
                for ms, first_offset, one in self._due
                if one.state != RESOLVED and one.due_ms == ms
            ]
            heapify(self._due)

    def _connections(self, group: ProducerGroup) -> dict[ClientId, GroupMember]:
        """The connected producers that may be asked."""
        found = self._connected.get(group)
        if found is None:
            members = self._producers(group)
            found = self._connected[group] = {member.client: member for member in members}
        return found

    def _producers(self, group: ProducerGroup) -> list[GroupMember]:
        """The connected producers whose users may publish to the topic of the half messages.

        Anybody can name any producer group in a heartbeat; a check contains the message.
        """
        members = self._context.clients.producers(group.name)
        access = self._context.access
        if not access.enabled():
            return members
        return [
            member
            for member in members
            if access.may_publish(member.user, member.address, group.topic)
        ]

    # --- actions that need the record of a half message

    def _run_jobs(self, now_ms: int) -> int:
        """Read half messages and run their actions; returns when to be called again."""
        for _ in range(2):  # a read from memory completes at once
            if self._job is None:
                actions = self._choose_actions()
                if not actions:
                    return NEVER
                self._job = ReadJob(actions, self._read([half for half, _ in actions]))
            job = self._job
            if not job.reading.done():
                return now_ms + POLL_MS
            self._job = None
            done = [
                self._run_action(half, action, data, now_ms)
                for (half, action), data in zip(job.actions, job.reading.result(), strict=True)
            ]
            if not all(done):
                return now_ms + RETRY_MS
        return now_ms

    def _read(self, half_messages: list[HalfMessage]) -> "Future[list[bytes | None]]":
        store, log_offsets = self._context.store, [half.log_offset for half in half_messages]
        written = store.log.written

        def read(log_offset: int) -> bytes | None:
            try:
                return store.lookup.record(log_offset, written)
            except (PenstockError, OSError) as error:
                log.error("can't read the half message at log offset %d: %s", log_offset, error)
                return _UNREADABLE

        return store.disk.submit(lambda: [read(log_offset) for log_offset in log_offsets])

    def _choose_actions(self) -> list[tuple[HalfMessage, Action]]:
        """Half messages to read next: first those to discard, then to check, then to move."""
        actions: list[tuple[HalfMessage, Action]] = []
        space = READ_BYTES_MAX
        while self._to_discard and len(actions) < READ_COUNT_MAX and space > 0:
            half = self._to_discard.popleft()
            if half.state == DISCARDING:
                actions.append((half, self._discard))
                space -= half.size
        groups = [group for group in self._half_messages.groups.values() if group.ready]
        self._round_robin += 1
        for number in range(len(groups)):
            group = groups[(self._round_robin + number) % len(groups)]
            allowed = CHECKS_IN_FLIGHT_MAX * len(self._connections(group)) - group.in_flight
            while group.ready and allowed > 0 and len(actions) < READ_COUNT_MAX and space > 0:
                half = group.ready.popleft()
                if half.state == READY:
                    actions.append((half, self._check))
                    space -= half.size
                    allowed -= 1
            group.resume_at = -1
            if group.ready and allowed <= 0:
                group.resume_at = CHECKS_IN_FLIGHT_MAX * len(self._connections(group)) // 2
        chosen = {half for half, _ in actions}
        for half in self._lagging():
            if len(actions) < READ_COUNT_MAX and space > 0 and half not in chosen:
                actions.append((half, self._move_forward))
                space -= half.size
        return actions

    def _lagging(self) -> list[HalfMessage]:
        """Half messages that keep the stored progress of the queue far behind its end."""
        queue = self._queues.queue
        if queue is None:
            return []
        far = queue.max_offset - max(MOVE_AFTER, MOVE_RATIO * len(self._half_messages.open))
        if self._queues.done_to() >= far:
            return []
        return [
            half
            for half in self._half_messages.oldest_first(READ_COUNT_MAX)
            if half.queue_offset < far and half.state != DISCARDING and not half.unmovable
        ]

    def _run_action(
        self, half: HalfMessage, action: Action, data: bytes | None, now_ms: int
    ) -> bool:
        """Run the action of a half message; False if it has to be retried."""
        if half.state == RESOLVED:
            return True
        if data == _UNREADABLE:  # it must not block the others
            half.unmovable = True
            if half.state in (READY, DISCARDING):
                interval_ms = self._context.settings.current.broker.transaction_check_ms
                self._wait_until(half, now_ms + interval_ms)
            return False
        try:
            action(half, data, now_ms)
            self._refused = False
            return True
        except PenstockError as error:
            if not self._refused:
                log.error("can't check half messages, will retry: %s", error)
            self._refused = True
            if half.state == DISCARDING:
                self._to_discard.append(half)
            elif half.state == READY:
                half.group.ready.append(half)
            return False

    def _discard(self, half: HalfMessage, data: bytes | None, now_ms: int) -> None:
        if half.state == DISCARDING:
            reason = f"no resolution after {half.checks} checks"
            self._resolution.discard(half, data, reason, now_ms)

    def _move_forward(self, half: HalfMessage, data: bytes | None, now_ms: int) -> None:
        """Append a half message again that lags behind the queue."""
        if data is None:
            self._discard_lost(half, now_ms)
        else:
            self._append_again(half, data, now_ms)

    def _discard_lost(self, half: HalfMessage, now_ms: int) -> None:
        """Discard a half message whose record is gone."""
        if half.state == CHECKING:
            half.group.in_flight -= 1
        self._mark_for_discard(half, now_ms)

    def _append_again(self, half: HalfMessage, data: bytes, now_ms: int) -> None:
        """Store the number of checks, unless the record would exceed its size limit."""
        status = self._queues.append_again(half, data, now_ms)
        if status == ILLEGAL:
            half.unmovable = True
        elif status != PUT_OK:
            raise self._context.rewriter.fault(status)

    def _check(self, half: HalfMessage, data: bytes | None, now_ms: int) -> None:
        """Send a check to a producer, after storing the number of checks so far."""
        if half.state != READY:
            return
        members = list(self._connections(half.group).values())
        if not members:
            half.group.ready.append(half)
            return
        if data is None:
            self._discard_lost(half, now_ms)
            return
        if half.checks > half.stored_checks:
            self._append_again(half, data, now_ms)
        half.group.round_robin += 1
        member = members[half.group.round_robin % len(members)]
        self._send_check(half, member, data)
        half.state, half.asked_client = CHECKING, member.client
        half.group.in_flight += 1
        interval_ms = self._context.settings.current.broker.transaction_check_ms
        self._set_due(half, now_ms + interval_ms)

    def _send_check(self, half: HalfMessage, member: GroupMember, data: bytes) -> None:
        record = read_half(data)
        assert record is not None, "it was read as a half message before"
        port = int.from_bytes(self._host[-4:], "big")
        ext = {
            "topic": TOPIC_TRANS_HALF,
            "tranStateTableOffset": str(half.queue_offset),
            "commitLogOffset": str(half.log_offset),
            "msgId": record.key,
            "transactionId": record.key,
            "offsetMsgId": encode_offset_id(self._host[:-4], port, half.log_offset),
            "bname": self._context.settings.current.broker.name,
        }
        body = self._original_message(half, record, data)
        code = RequestCode.CHECK_TRANSACTION_STATE
        self._context.effects.put(
            NotifyClient(member.client, code, {k: v for k, v in ext.items() if v}, body)
        )
        self.sent += 1

    def _original_message(self, half: HalfMessage, record: HalfRecord, data: bytes) -> bytes:
        """The message as its producer sent it: with its real topic and queue."""
        stored, message = StoredRecord(), self._record
        stored.bind(memoryview(bytearray(data)))
        found = stored.read(0, len(data))
        assert found == RECORD
        properties = with_checks(record.properties, half.checks + 1)
        body = data[stored.body_at : stored.body_at + stored.body_length]
        message.fill(record.topic.encode(), body, encode_properties(properties))
        queue_id = parse_int(record.properties.get(PROPERTY_REAL_QUEUE_ID, ""))
        message.queue_id = max(queue_id or 0, 0)
        message.flag, message.sys_flag = stored.flag, stored.sys_flag
        message.born_ms = stored.born_ms
        message.born_host = data[48 : 48 + stored.born_host_length]
        message.store_host = self._host
        message.reconsume_times = stored.reconsume_times
        message.prepare()
        target = bytearray(message.size)
        message.put(memoryview(target), 0, half.queue_offset, half.log_offset, stored.store_ms)
        message.release()
        return bytes(target)
