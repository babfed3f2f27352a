"""Messages that wait at a broker: delayed and timer messages, and open half messages.

Brokers keep them in internal topics, which clients can't pull on Penstock. Their queue entries
(QUERY_CONSUME_QUEUE) and single records (VIEW_MESSAGE_BY_ID) can be read on Penstock and on Apache.
With access control a user needs Get on the internal topic, and on the topic of each message.

| Topic | What waits |
|---|---|
| SCHEDULE_TOPIC_XXXX | queue = level - 1: entries from the delivered offset on; their tag code is the delivery time |
| rmq_sys_wheel_timer | queue 0: records whose time is to come, without recalls and what they recall; the newest record of a message that was stored again |
| RMQ_SYS_TRANS_HALF_TOPIC | queue 0: records from the offset of CID_RMQ_SYS_TRANS on, without those that a record of RMQ_SYS_TRANS_OP_HALF_TOPIC names |

A result is partial if it was limited, or a record could not be read.
"""  # noqa: E501 - a table

import base64
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from penstock.client.admin.admin_index import decoded
from penstock.client.admin.admin_messages import MessageAdmin
from penstock.client.admin.admin_values import BrokerAddress
from penstock.client.received_message import ReceivedMessage
from penstock.errors import InvalidParameter, NoPermission, PeerError, PenstockError, Refused
from penstock.plurals import count_text
from penstock.wire import fastjson
from penstock.wire.bodies.admin_bodies import ConsumeQueueData, QueryConsumeQueueResponseBody
from penstock.wire.bodies.client_bodies import KVTable, MessageQueue
from penstock.wire.bodies.table_bodies import TimerMetricsSerializeWrapper
from penstock.wire.codes import (
    GROUP_INNER_PRODUCER,
    GROUP_SYS_TRANS,
    PROPERTY_PRODUCER_GROUP,
    PROPERTY_REAL_QUEUE_ID,
    PROPERTY_REAL_TOPIC,
    PROPERTY_TIMER_DEL_UNIQKEY,
    PROPERTY_TIMER_DELIVER_MS,
    PROPERTY_TIMER_OUT_MS,
    PROPERTY_TRANSACTION_CHECK_TIMES,
    TOPIC_SCHEDULE,
    TOPIC_TIMER,
    TOPIC_TRANS_HALF,
    TOPIC_TRANS_OP_HALF,
    RequestCode,
)
from penstock.wire.java_numbers import parse_nonnegative

SCAN_MAX = 2_000
"""Records that are read at each broker, unless told otherwise."""
ENTRIES_MAX = 500
_LEVEL = re.compile(r"scheduleMessageOffset_(\d+)")

S = TypeVar("S", int, str)


@dataclass(frozen=True, slots=True)
class ScheduledMessage:
    """A message that waits for its delivery. None is unknown."""

    topic: str
    queue_id: int | None
    message_id: str
    keys: tuple[str, ...]
    tags: str | None
    deliver_ms: int
    store_ms: int
    broker_name: str
    level: int | None
    """Its delay level; None: it has a delivery time of its own."""
    recall_handle: str | None
    """Recalls a timer message; messages of delay levels can't be recalled."""


@dataclass(frozen=True, slots=True)
class ScheduledMessages:
    """The messages that wait, by delivery time."""

    messages: tuple[ScheduledMessage, ...]
    by_level: dict[int, int]
    """The number of messages that wait, by delay level."""
    by_topic: dict[str, int]
    """The number of timer messages that wait, by topic, as the brokers count them."""
    partial: tuple[str, ...]
    """Why messages may be missing."""
    unreachable: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class OpenTransaction:
    """A half message that waits for its commit or rollback."""

    topic: str
    group: str
    """The producer group that is asked for the outcome."""
    message_id: str
    keys: tuple[str, ...]
    tags: str | None
    born_ms: int
    store_ms: int
    """When its newest record was stored."""
    checks: int
    """Checks that were counted so far."""
    broker_name: str
    queue_offset: int


@dataclass(frozen=True, slots=True)
class OpenTransactions:
    """The open half messages, oldest first."""

    messages: tuple[OpenTransaction, ...]
    partial: tuple[str, ...]
    unreachable: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Window:
    """Entries of an internal queue, and the offset of the first."""

    begin: int
    entries: Sequence[ConsumeQueueData]


class WaitingAdmin(MessageAdmin):
    """The part of `AsyncAdmin` about messages that wait at the broker."""

    async def scheduled(
        self,
        *,
        topic: str | None = None,
        cluster: str | None = None,
        count_max: int = 1_000,
        scan_max: int = SCAN_MAX,
    ) -> ScheduledMessages:
        """Delayed and timer messages that wait, by delivery time; only those of a topic.

        At most `scan_max` records are read at each broker: of each delay level those that are due
        first, of the timer those that were stored last.
        """
        found = await self.from_each(
            await self.masters(cluster), lambda broker: self._scheduled_at(broker, scan_max)
        )
        parts = [part for _, part in found.items]
        messages = sorted(
            (one for part in parts for one in part.messages if topic in (None, one.topic)),
            key=lambda message: (message.deliver_ms, message.message_id),
        )
        partial = [text for part in parts for text in part.partial]
        if len(messages) > count_max:
            partial.append(_more_found(len(messages) - count_max))
        return ScheduledMessages(
            tuple(messages[:count_max]),
            _sum(part.by_level for part in parts),
            _sum(part.by_topic for part in parts),
            tuple(partial),
            found.unreachable,
        )

    async def recall(self, handle: str) -> str:
        """Cancel a timer message by its recall handle; returns the message id."""
        place = read_recall_handle(handle)
        fields = {
            "topic": place.topic,
            "recallHandle": handle,
            "producerGroup": GROUP_INNER_PRODUCER,
            "bname": place.broker_name,
        }
        broker = await self.broker(place.broker_name)
        answer = await self.ask(broker.address, RequestCode.RECALL_MESSAGE, fields)
        return answer.ext.get("msgId", place.message_id)

    async def open_transactions(
        self,
        *,
        topic: str | None = None,
        cluster: str | None = None,
        count_max: int = 1_000,
        scan_max: int = SCAN_MAX,
    ) -> OpenTransactions:
        """Half messages that are neither committed nor rolled back, oldest first; of a topic."""
        found = await self.from_each(
            await self.masters(cluster), lambda broker: self._transactions_at(broker, scan_max)
        )
        messages = sorted(
            (one for _, part in found.items for one in part.messages if topic in (None, one.topic)),
            key=lambda message: (message.born_ms, message.message_id),
        )
        partial = [text for _, part in found.items for text in part.partial]
        if len(messages) > count_max:
            partial.append(_more_found(len(messages) - count_max))
        return OpenTransactions(tuple(messages[:count_max]), tuple(partial), found.unreachable)

    # --- scheduled messages

    async def _scheduled_at(self, broker: BrokerAddress, scan_max: int) -> ScheduledMessages:
        answer = await self.ask(broker.address, RequestCode.GET_BROKER_RUNTIME_INFO)
        levels = _waiting_levels(fastjson.decode(answer.body, KVTable).table)
        messages: list[ScheduledMessage] = []
        partial: list[str] = []
        left = scan_max
        for level, (begin, end) in sorted(levels.items()):
            queue = MessageQueue(TOPIC_SCHEDULE, broker.name, level - 1)
            window = await self._window(broker, queue, begin, min(end, begin + left))
            left -= len(window.entries)
            if begin + len(window.entries) < end:
                missing = end - begin - len(window.entries)
                unread_text = f"{count_text(missing, 'message')} of level {level}"
                were = "was" if missing == 1 else "were"
                partial.append(f"{broker.name}: {unread_text} {were} not read")
            records, unread = await self._records(broker, TOPIC_SCHEDULE, window.entries)
            partial += unread
            for entry, record in records:
                if record is not None:
                    due = entry.tags_code
                    messages += self._scheduled(broker, record, due, level=level)
        timed, why = await self._timed(broker, scan_max)
        counts = await self._timer_counts(broker)
        return ScheduledMessages(
            tuple(messages + timed),
            {level: end - begin for level, (begin, end) in levels.items()},
            counts,
            (*partial, *why),
        )

    async def _timed(
        self, broker: BrokerAddress, scan_max: int
    ) -> tuple[list[ScheduledMessage], list[str]]:
        queue = MessageQueue(TOPIC_TIMER, broker.name, 0)
        begin, end = await self._queue_ends(broker, queue)
        window = await self._window(broker, queue, max(begin, end - scan_max), end)
        records, partial = await self._records(broker, TOPIC_TIMER, window.entries)
        if window.begin > begin and window.entries:
            partial.append(
                f"{broker.name}: the {window.begin - begin} oldest timer records were not read"
            )
        now_ms = self.session.clock.now_ms()
        recalled: set[tuple[str, str]] = set()
        found: dict[tuple[str, str], ScheduledMessage] = {}
        for _, record in reversed(records):  # the newest record of a message counts
            if record is None:
                continue
            properties = record.properties
            topic = properties.get(PROPERTY_REAL_TOPIC, "")
            deleted = properties.get(PROPERTY_TIMER_DEL_UNIQKEY)
            if deleted is not None:
                recalled.add((topic, deleted.removeprefix(f"{topic}+")))
                continue
            out_ms = parse_nonnegative(properties.get(PROPERTY_TIMER_OUT_MS, ""))
            if out_ms is None or out_ms <= now_ms:
                continue
            due = parse_nonnegative(properties.get(PROPERTY_TIMER_DELIVER_MS, "")) or out_ms
            for message in self._scheduled(broker, record, due, out_ms=out_ms):
                found.setdefault((topic, message.message_id), message)
        waiting = [message for key, message in found.items() if key not in recalled]
        return waiting, partial

    def _scheduled(
        self,
        broker: BrokerAddress,
        record: ReceivedMessage,
        due_ms: int,
        *,
        level: int | None = None,
        out_ms: int | None = None,
    ) -> list[ScheduledMessage]:
        """The message in a record; none if it is of another namespace."""
        properties = record.properties
        topic = properties.get(PROPERTY_REAL_TOPIC, "")
        if not topic or not self.is_ours(topic):
            return []
        unique = record.unique_id
        handle = None
        if out_ms is not None and unique:
            handle = make_recall_handle(topic, broker.name, out_ms, unique)
        return [
            ScheduledMessage(
                topic=self.session.without_namespace(topic),
                queue_id=parse_nonnegative(properties.get(PROPERTY_REAL_QUEUE_ID, "")),
                message_id=record.message_id,
                keys=tuple(record.keys),
                tags=record.tags,
                deliver_ms=due_ms,
                store_ms=record.store_ms,
                broker_name=broker.name,
                level=level,
                recall_handle=handle,
            )
        ]

    async def _timer_counts(self, broker: BrokerAddress) -> dict[str, int]:
        """Waiting timer messages by topic; none if the broker has no timer."""
        try:
            answer = await self.ask(broker.address, RequestCode.GET_TIMER_METRICS)
        except NoPermission:
            raise
        except Refused:
            return {}
        counts = fastjson.decode(answer.body, TimerMetricsSerializeWrapper).timing_count
        return {
            self.session.without_namespace(topic): metric.count
            for topic, metric in counts.items()
            if metric.count > 0 and self.is_ours(topic)
        }

    # --- transactions

    async def _transactions_at(self, broker: BrokerAddress, scan_max: int) -> OpenTransactions:
        half = MessageQueue(TOPIC_TRANS_HALF, broker.name, 0)
        op = MessageQueue(TOPIC_TRANS_OP_HALF, broker.name, 0)
        partial: list[str] = []
        halves = await self._unsettled(broker, half, scan_max, partial)
        # An op message follows its half message, and a batch of Apache's names many.
        ops = await self._unsettled(broker, op, 2 * scan_max, partial)
        resolved: set[int] = set()
        records, unread = await self._records(broker, TOPIC_TRANS_OP_HALF, ops.entries)
        partial += unread
        for _, record in records:
            if record is not None:
                words = record.body.decode("latin-1").split(",")
                resolved.update(int(word) for word in words if word.isdecimal())
        open_entries = [
            (halves.begin + index, entry)
            for index, entry in enumerate(halves.entries)
            if halves.begin + index not in resolved
        ]
        records, unread = await self._records(
            broker, TOPIC_TRANS_HALF, [entry for _, entry in open_entries]
        )
        partial += unread
        found = [
            self._transaction(broker, offset, record)
            for (offset, _), (_, record) in zip(open_entries, records, strict=True)
            if record is not None and self.is_ours(record.properties.get(PROPERTY_REAL_TOPIC, ""))
        ]
        return OpenTransactions(tuple(found), tuple(partial))

    async def _unsettled(
        self, broker: BrokerAddress, queue: MessageQueue, scan_max: int, partial: list[str]
    ) -> _Window:
        """The newest entries after the progress of the broker's own group."""
        low, end = await self._queue_ends(broker, queue)
        if end == 0:
            return _Window(0, [])
        committed = await self._committed(broker, GROUP_SYS_TRANS, queue)
        begin = max(low, min(committed or 0, end))
        first = max(begin, end - scan_max)
        if first > begin:
            partial.append(
                f"{broker.name}: the {first - begin} oldest entries of {queue.topic} were not read"
            )
        return await self._window(broker, queue, first, end)

    def _transaction(
        self, broker: BrokerAddress, offset: int, record: ReceivedMessage
    ) -> OpenTransaction:
        properties = record.properties
        group = properties.get(PROPERTY_PRODUCER_GROUP, "")
        return OpenTransaction(
            topic=self.session.without_namespace(properties.get(PROPERTY_REAL_TOPIC, "")),
            group=self.session.without_namespace(group),
            message_id=record.message_id,
            keys=tuple(record.keys),
            tags=record.tags,
            born_ms=record.born_ms,
            store_ms=record.store_ms,
            checks=parse_nonnegative(properties.get(PROPERTY_TRANSACTION_CHECK_TIMES, "")) or 0,
            broker_name=broker.name,
            queue_offset=offset,
        )

    # --- internal queues

    async def _queue_ends(self, broker: BrokerAddress, queue: MessageQueue) -> tuple[int, int]:
        """The first and the next offset of a queue; 0 and 0 if it does not exist."""
        fields = {"topic": queue.topic, "queueId": str(queue.queue_id)}
        ends = []
        for code in (RequestCode.GET_MIN_OFFSET, RequestCode.GET_MAX_OFFSET):
            try:
                answer = await self.ask(broker.address, code, fields)
            except NoPermission:
                raise
            except Refused:
                return 0, 0
            ends.append(parse_nonnegative(answer.ext.get("offset", "")) or 0)
        return min(ends), ends[1]

    async def _window(
        self, broker: BrokerAddress, queue: MessageQueue, begin: int, end: int
    ) -> _Window:
        """The entries of a queue between two offsets."""
        entries: list[ConsumeQueueData] = []
        while begin + len(entries) < end:
            at = begin + len(entries)
            fields = {
                "topic": queue.topic,
                "queueId": str(queue.queue_id),
                "index": str(at),
                "count": str(min(end - at, ENTRIES_MAX)),
                "consumerGroup": "",
            }
            answer = await self.ask(broker.address, RequestCode.QUERY_CONSUME_QUEUE, fields)
            body = fastjson.decode(answer.body, QueryConsumeQueueResponseBody)
            if not body.queue_data:
                break
            entries += body.queue_data
        return _Window(begin, entries[: end - begin])

    async def _records(
        self, broker: BrokerAddress, topic: str, entries: Sequence[ConsumeQueueData]
    ) -> tuple[list[tuple[ConsumeQueueData, ReceivedMessage | None]], list[str]]:
        """The records of entries, and why some are missing."""
        problems: dict[str, int] = {}

        async def read(entry: ConsumeQueueData) -> ReceivedMessage | None:
            fields = {"offset": str(entry.physic_offset)}
            try:
                try:
                    named = {**fields, "topic": topic}
                    answer = await self.ask(broker.address, RequestCode.VIEW_MESSAGE_BY_ID, named)
                except NoPermission:  # Apache 5.5 wants the topic of the message, or none
                    answer = await self.ask(broker.address, RequestCode.VIEW_MESSAGE_BY_ID, fields)
                return next(iter(decoded(self, answer.body, broker.name)), None)
            except PeerError:
                raise
            except PenstockError as error:  # deleted meanwhile, or of a topic without the right
                text = type(error).__name__
                problems[text] = problems.get(text, 0) + 1
                return None

        found = await self.for_each(entries, read)
        why = [
            f"{broker.name}: {count} records of {topic} could not be read ({name})"
            for name, count in problems.items()
        ]
        return list(zip(entries, found, strict=True)), why


@dataclass(frozen=True, slots=True)
class RecallPlace:
    """The fields of a recall handle."""

    topic: str
    broker_name: str
    time_ms: int
    message_id: str


def make_recall_handle(topic: str, broker_name: str, out_ms: int, message_id: str) -> str:
    """The handle of a timer message: base64url("v1 topic broker time id")."""
    # As brokers do: the first millisecond of a slot belongs to the slot before.
    text = f"v1 {topic} {broker_name} {out_ms + 1} {message_id}"
    return base64.urlsafe_b64encode(text.encode()).decode()


def _more_found(count: int) -> str:
    return f"{count_text(count, 'more message')} {'was' if count == 1 else 'were'} found"


def read_recall_handle(handle: str) -> RecallPlace:
    """The fields of a handle; raises InvalidParameter."""
    try:
        data = handle.encode("ascii")
        plain = base64.urlsafe_b64decode(data + b"=" * (-len(data) % 4)).decode()
        version, topic, broker_name, time, message_id, *_ = plain.split(" ")
    except ValueError:
        version = time = ""
        topic = broker_name = message_id = ""
    if version != "v1" or not time.isdecimal():
        raise InvalidParameter(
            f"{handle[:40]!r} is not a recall handle",
            hint="take it from the receipt of the message, or from the list of scheduled messages",
        )
    return RecallPlace(topic, broker_name, int(time), message_id)


def _waiting_levels(table: dict[str, str]) -> dict[int, tuple[int, int]]:
    """Delivered and next offset of each delay level with waiting messages."""
    found = {}
    for name, text in table.items():
        match = _LEVEL.fullmatch(name)
        words = text.split(",")
        if match is None or len(words) != 2 or not all(word.isdecimal() for word in words):
            continue
        delivered, end = map(int, words)
        if delivered < end:
            found[int(match[1])] = (delivered, end)
    return found


def _sum(tables: Iterable[dict[S, int]]) -> dict[S, int]:
    total: dict[S, int] = {}
    for table in tables:
        for key, count in table.items():
            total[key] = total.get(key, 0) + count
    return total
