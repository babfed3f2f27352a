"""Queries for messages by key, unique id, tag or log offset, and for the entries of a queue.

With access lists, the user needs the right on the topic of each message that is found: a request by
log offset can name any topic, and an internal topic holds messages of all topics.
"""

from typing import cast

from penstock.broker.auth.policies import Action
from penstock.broker.context import BrokerContext
from penstock.errors import Refused
from penstock.rpc.answers import Answer, InThread, Reply
from penstock.rpc.command import Command
from penstock.rpc.router import Row
from penstock.store.consumequeue.consumequeue import unpack_entries
from penstock.wire import fastjson
from penstock.wire.bodies.admin_bodies import ConsumeQueueData, QueryConsumeQueueResponseBody
from penstock.wire.codes import (
    EXT_UNIQUE_KEY_QUERY,
    RequestCode,
    ResponseCode,
    is_send_forbidden,
    real_topic,
)
from penstock.wire.message import decode_message

UNIQUE_MAX = 32
"""Most messages of a query by unique id, the newest ones, whatever the client asks for."""
ENTRIES_MAX = 1_000
"""Most entries of one response: about 100 KB; mqadmin queryCq asks for 10."""
_TAG = "T"  # indexType of 5.4; keys (K) and unique ids (U) have no prefix in the index


class QueryHandlers:
    """QUERY_MESSAGE, VIEW_MESSAGE_BY_ID, QUERY_CONSUME_QUEUE."""

    def __init__(self, context: BrokerContext) -> None:
        self._context = context

    def rows(self) -> list[Row]:
        return [
            Row(RequestCode.QUERY_MESSAGE, self.by_key),
            Row(RequestCode.VIEW_MESSAGE_BY_ID, self.by_offset),
            Row(RequestCode.QUERY_CONSUME_QUEUE, self.entries),
        ]

    def by_key(self, command: Command) -> Answer:
        """Messages with a key, unique id or tag, by store time."""
        topic, key = command.text("topic"), command.text("key")
        begin_ms, end_ms = command.i64("beginTimestamp"), command.i64("endTimestamp")
        most = max(command.i32("maxNum"), 0)
        if command.truth(EXT_UNIQUE_KEY_QUERY):
            most = UNIQUE_MAX
        elif command.ext.get("indexType") == _TAG:
            key = f"{_TAG}#{key}"
        store, access = self._context.store, self._context.access
        confirm_offset = store.confirm_offset

        def work() -> tuple[bytes, set[str]]:
            found = store.lookup.by_key(
                topic,
                key,
                begin_ms=begin_ms,
                end_ms=end_ms,
                most=most,
                confirm_offset=confirm_offset,
            )
            mixed = found if is_send_forbidden(topic) else []  # holds messages of other topics
            return b"".join(found), {_topic_of(record) for record in mixed}

        def answer(found: tuple[bytes, set[str]]) -> Answer:
            body, topics = found
            if not body:
                return Reply(
                    ResponseCode.QUERY_NOT_FOUND,
                    _index_position(0, 0),
                    remark=f"no message of topic {topic} has the key {key} in this time range",
                )
            for found_topic in sorted(topics):
                refusal = access.check_topic(command, found_topic, Action.SUB, Action.GET)
                if refusal is not None:
                    return refusal
            file = store.index.current if store.index is not None else None
            position = (file.end_ms(), file.end_offset()) if file is not None else (0, 0)
            return Reply(ext=_index_position(*position), body=body)

        return InThread(work, answer)

    def by_offset(self, command: Command) -> Answer:
        """The message at a log offset, which is the last part of its offset message id."""
        offset = command.i64("offset")
        store = self._context.store
        confirm_offset = store.confirm_offset

        def answer(record: bytes | None) -> Answer:
            if record is None:
                raise Refused(f"there is no message at the log offset {offset}")
            refusal = self._context.access.check_topic(command, _topic_of(record), Action.GET)
            return refusal or Reply(body=record)

        return InThread(lambda: store.lookup.record(offset, confirm_offset), answer)

    def entries(self, command: Command) -> Answer:
        """Some entries of a queue."""
        topic, queue_id = command.text("topic"), command.i32("queueId")
        index, count = command.i64("index"), command.i32("count")
        context = self._context
        queue = context.store.queue(topic, queue_id)
        if queue is None:
            raise Refused(f"the topic {topic} has no queue {queue_id} with messages on this broker")
        low, high = queue.min_offset, queue.visible_max(context.store.confirm_offset)
        if not low <= index < high:
            raise Refused(f"queue {queue_id} of {topic} has offsets {low} to {high}, not {index}")
        group = command.text_or("consumerGroup")
        subscription = context.clients.subscription(group, topic) if group else None
        filter_data = None
        if group:
            # There are no compiled filters in a queue's entries; tools print this text.
            filter_data = f"{group}@{topic} is not online!" if subscription is None else "null"
        count = max(min(count, high - index, ENTRIES_MAX), 0)

        def work() -> bytes:
            data = queue.read(index, count) or b""
            body = QueryConsumeQueueResponseBody(
                subscription_data=subscription,
                filter_data=filter_data,
                queue_data=_entries(data),
                max_queue_index=high,
                min_queue_index=low,
            )
            return fastjson.encode(body)

        return InThread(work, lambda body: Reply(body=body))


def _topic_of(record: bytes) -> str:
    """The topic that a stored message was sent to."""
    message = decode_message(record)
    return real_topic(message.topic, message.properties)


def _index_position(updated_ms: int, offset: int) -> dict[str, str]:
    """Time and log offset of the last message in the index."""
    return {
        "indexLastUpdateTimestamp": str(updated_ms),
        "indexLastUpdatePhyoffset": str(offset),
    }


def _entries(data: bytes) -> list[ConsumeQueueData]:
    """The entries as JSON in place of a list: much faster than encoding an object each."""
    items = [
        f'{{"eval":false,"physicOffset":{offset},"physicSize":{size},"tagsCode":{code}}}'
        for offset, size, code in unpack_entries(data)
    ]
    return cast("list[ConsumeQueueData]", fastjson.RawJson(f"[{','.join(items)}]"))
