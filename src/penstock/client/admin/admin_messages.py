"""Messages: find by id, key, offset or time, track, consume directly, read dead letters."""

import contextlib
from collections.abc import AsyncGenerator, Mapping
from datetime import datetime

from penstock.client.admin.admin_browse import QueueView, Span, read_page
from penstock.client.admin.admin_core import BrokerResults, timestamp_ms
from penstock.client.admin.admin_follow import Follower, StartAt
from penstock.client.admin.admin_index import FOUND_MAX, decoded, query_index
from penstock.client.admin.admin_members import RELAY_MS
from penstock.client.admin.admin_resend import ResendAdmin
from penstock.client.admin.admin_values import DirectResult, MessagePage, Track, TrackState
from penstock.client.consumer.subscription import Subscription
from penstock.client.received_message import ReceivedMessage
from penstock.errors import ConsumerNotOnline, HeaderError
from penstock.wire import fastjson
from penstock.wire.bodies.admin_bodies import ConsumeMessageDirectlyResult
from penstock.wire.bodies.client_bodies import MessageQueue
from penstock.wire.codes import (
    DLQ_TOPIC_PREFIX,
    GROUP_TOOLS_CONSUMER,
    RequestCode,
    ResponseCode,
    is_system_group,
)
from penstock.wire.message_ids import decode_offset_id

_THERE = (ResponseCode.SUCCESS, ResponseCode.SYSTEM_ERROR)


class MessageAdmin(ResendAdmin):
    """The part of `AsyncAdmin` about single messages."""

    # --- find

    async def find_message(self, topic: str, message_id: str) -> ReceivedMessage | None:
        """A message by its unique id or offset id; None if it does not exist (any more)."""
        return await self.message_by_unique_id(topic, message_id) or (
            await self.message_by_offset_id(message_id, topic=topic)
            if _is_offset_id(message_id)
            else None
        )

    async def message_by_unique_id(
        self, topic: str, unique_id: str, *, since: datetime | None = None
    ) -> ReceivedMessage | None:
        """A message by the id that its producer gave it; the last one if there are several.

        None if it does not exist (any more). Raises if it was not found and a broker that may have
        it can't be reached.
        """
        found = await self._by_key(topic, unique_id, since, None, FOUND_MAX, unique=True)
        messages = [message for message in _sorted(found) if message.unique_id == unique_id]
        if not messages and found.problem is not None:
            raise found.problem
        return messages[-1] if messages else None

    async def message_by_offset_id(
        self, offset_id: str, *, topic: str | None = None
    ) -> ReceivedMessage | None:
        """A message by the id that its broker gave it. With access control the topic is needed."""
        place = decode_offset_id(offset_id)
        host = f"[{place.host}]" if ":" in place.host else place.host
        brokers = await self.brokers()
        # The id has the broker's IP address; it may be registered with a host name.
        candidates = [b for b in brokers if b.address == f"{host}:{place.port}"] or brokers
        fields = {"offset": str(place.offset)}
        if topic is not None:
            fields["topic"] = self.session.with_namespace(topic)
        found = await self.ask_each(candidates, RequestCode.VIEW_MESSAGE_BY_ID, fields, good=_THERE)
        for broker, answer in found.items:
            if answer.code == ResponseCode.SUCCESS and answer.body:
                for message in decoded(self, answer.body, broker.name):
                    if message.offset_id == offset_id.upper():
                        return message
        if found.problem is not None:
            raise found.problem
        return None

    async def messages_by_key(
        self,
        topic: str,
        key: str,
        *,
        since: datetime | None = None,
        until: datetime | None = None,
        count_max: int = FOUND_MAX,
    ) -> list[ReceivedMessage]:
        """Messages with a key, oldest first; the newest `count_max` of each broker."""
        found = await self._by_key(topic, key, since, until, count_max, unique=False)
        return [message for message in _sorted(found) if key in message.keys]

    async def message_at(self, queue: MessageQueue, offset: int) -> ReceivedMessage | None:
        """The message at an offset of a queue; None if it does not exist (any more)."""
        full = self.full_queue(queue)
        pulled = await QueueView(self).pull(full, offset, 1, Subscription(full.topic))
        return next((m for m in pulled.messages if m.queue_offset == offset), None)

    async def browse(
        self,
        topic: str,
        *,
        since: datetime | None = None,
        until: datetime | None = None,
        tags: str = "*",
        sql: str | None = None,
        queue: MessageQueue | None = None,
        newest_first: bool = False,
        count_max: int = FOUND_MAX,
        resume: Mapping[MessageQueue, int] | None = None,
    ) -> MessagePage:
        """Messages of a topic by store time, from all queues or one.

        For the next page pass the `resume` of this one and the same other arguments.
        """
        name = self.session.with_namespace(topic)
        if queue is not None:
            queues = [self.full_queue(queue)]
        else:
            route = await self.route(topic)
            queues = [
                MessageQueue(name, data.broker_name, number)
                for data in route.data.queue_datas
                for number in range(data.read_queue_nums)
            ]
        span = Span(
            None if since is None else timestamp_ms(since),
            None if until is None else timestamp_ms(until),
            newest_first,
        )
        return await read_page(
            self,
            sorted(queues),
            Subscription.of(name, tags, sql, version=0),
            span,
            count_max,
            None if resume is None else {self.full_queue(q): at for q, at in resume.items()},
        )

    async def follow(
        self,
        topic: str,
        *,
        start_at: StartAt = "last",
        tags: str = "*",
        sql: str | None = None,
        group: str = GROUP_TOOLS_CONSUMER,
    ) -> AsyncGenerator[ReceivedMessage, None]:
        """The new messages of a topic, without end, in the order of each queue.

        No offsets of groups change. `group` is the group that access control checks.
        """
        name = self.session.with_namespace(topic)
        wanted = Subscription.of(name, tags, sql, version=0)
        # RocketMQ's own groups are not in a namespace.
        named = group if is_system_group(group) else self.session.with_namespace(group)
        follower = Follower(self, wanted, start_at, named)
        async with contextlib.aclosing(follower.messages()) as messages:
            async for message in messages:
                yield message

    # --- track

    async def track(self, message: ReceivedMessage) -> list[Track]:
        """For each group of the message's topic, whether it has consumed the message."""
        queue = message.queue
        broker = await self.broker(queue.broker_name)
        tracks = []
        for group in await self.groups_of_topic(queue.topic):
            members = await self.members(group)
            name = self.session.with_namespace(group)
            committed = await self._committed(broker, name, self.full_queue(queue))
            if members.model == "BROADCASTING":
                state = TrackState.BROADCAST
            elif committed is None:
                state = TrackState.UNKNOWN
            elif committed <= message.queue_offset:
                state = TrackState.PENDING
            else:
                state = TrackState.CONSUMED
                for subscription in members.subscriptions:
                    wanted = subscription.tags
                    if subscription.topic == queue.topic and wanted and message.tags not in wanted:
                        state = TrackState.FILTERED
            tracks.append(Track(group, state, bool(members.members)))
        return tracks

    # --- consume again

    async def consume_directly(
        self, group: str, message: ReceivedMessage, client_id: str | None = None
    ) -> DirectResult:
        """Have a connected consumer of a group handle a message now.

        No message is stored and no offset changes. Raises ConsumerNotOnline.
        """
        broker = await self.broker(message.broker_name)
        name = self.session.with_namespace(group)
        found = await self._connections([broker], name)
        table = found.items[0][1]
        ids = sorted(c.client_id or "" for c in table.connection_set) if table is not None else []
        if not ids or (client_id is not None and client_id not in ids):
            who = f"the client {client_id}" if client_id is not None else "any client"
            raise ConsumerNotOnline(
                f"{who} of the group {group} is not connected to {broker.name} "
                f"({broker.address}), which has the message"
            )
        chosen = client_id or ids[0]
        fields = {
            "consumerGroup": name,
            "clientId": chosen,
            "msgId": message.offset_id,
            "brokerName": broker.name,
            "topic": message.stored_topic,
        }
        answer = await self.ask(
            broker.address, RequestCode.CONSUME_MESSAGE_DIRECTLY, fields, timeout_ms=RELAY_MS
        )
        result = fastjson.decode(answer.body, ConsumeMessageDirectlyResult)
        return DirectResult(
            client_id=chosen,
            result=result.consume_result or "",
            remark=result.remark,
            spent_ms=result.spent_time_mills,
            orderly=result.order,
        )

    async def dead_letters(
        self,
        group: str,
        *,
        since: datetime | None = None,
        until: datetime | None = None,
        newest_first: bool = False,
        count_max: int = FOUND_MAX,
        resume: Mapping[MessageQueue, int] | None = None,
    ) -> MessagePage:
        """The dead letters of a group, as `browse` returns messages."""
        topic = DLQ_TOPIC_PREFIX + group
        if await self.session.find_route(self.session.with_namespace(topic)) is None:
            return MessagePage((), None)
        return await self.browse(
            topic,
            since=since,
            until=until,
            newest_first=newest_first,
            count_max=count_max,
            resume=resume,
        )

    # --- private

    async def _by_key(
        self,
        topic: str,
        key: str,
        since: datetime | None,
        until: datetime | None,
        count_max: int,
        *,
        unique: bool,
    ) -> BrokerResults[list[ReceivedMessage]]:
        having = set((await self.route(topic)).brokers)
        masters = [broker for broker in await self.masters() if broker.name in having]
        return await query_index(
            self,
            masters,
            self.session.with_namespace(topic),
            key,
            since_ms=None if since is None else timestamp_ms(since),
            until_ms=None if until is None else timestamp_ms(until),
            count_max=count_max,
            unique=unique,
        )


def _sorted(found: BrokerResults[list[ReceivedMessage]]) -> list[ReceivedMessage]:
    messages = [message for _, part in found.items for message in part]
    return sorted(messages, key=lambda message: (message.store_ms, message.physical_offset))


def _is_offset_id(text: str) -> bool:
    try:
        decode_offset_id(text)
    except HeaderError:
        return False
    return True
