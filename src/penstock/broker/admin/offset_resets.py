"""Resets, clones and corrections of consumer offsets by tools."""

from collections.abc import Callable, Mapping

from penstock.broker.admin.large_requests import refuse_too_many_queues
from penstock.broker.consumers.client_groups import GroupMember
from penstock.broker.context import BrokerContext
from penstock.broker.topics import refuse_internal
from penstock.errors import ConsumerNotOnline, GroupNotExist, Refused
from penstock.rpc.answers import Answer, InThread, NotifyClient, Reply
from penstock.rpc.command import Command
from penstock.rpc.json_replies import reply_from_pool
from penstock.rpc.router import Row
from penstock.rpc.steps import in_steps, run_in_steps
from penstock.store.consumequeue.consumequeue import ConsumeQueue
from penstock.wire import fastjson
from penstock.wire.bodies.admin_bodies import (
    MessageQueueForC,
    QueryCorrectionOffsetBody,
    ResetOffsetBody,
    ResetOffsetBodyForC,
)
from penstock.wire.bodies.client_bodies import MessageQueue, TopicConfig
from penstock.wire.codes import V3_0_7, LanguageCode, RequestCode, is_internal_topic

NO_CORRECTION = (1 << 63) - 1
"""Tells a tool that the compared group is behind all others."""

NOTIFIED_PER_STEP = 1
"""Consumers that are notified in one step: the new offsets of 100,000 queues are 9 MB."""

OffsetsByQueueId = dict[int, int]


class ResetHandlers:
    """INVOKE_BROKER_TO_RESET_OFFSET, CLONE_GROUP_OFFSET, QUERY_CORRECTION_OFFSET."""

    def __init__(self, context: BrokerContext) -> None:
        self._context = context

    def rows(self) -> list[Row]:
        return [
            Row(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, self.reset),
            Row(RequestCode.CLONE_GROUP_OFFSET, self.clone),
            Row(RequestCode.QUERY_CORRECTION_OFFSET, self.correction),
        ]

    def reset(self, command: Command) -> Answer:
        """Reset a group's offsets on a topic: to a time, to the end (a negative time), or to an
        offset of one queue."""
        topic, group = command.text("topic"), command.text("group")
        refuse_internal(topic)
        config = self._context.topics.need(topic)
        if not self._context.settings.current.broker.server_side_reset:
            return self._reset_by_clients(command, config, group)
        if self._context.groups.get(group) is None:
            raise GroupNotExist(f"the group {group} does not exist on this broker")
        queue_id = command.i32_or("queueId", -1)
        offset = command.i64_or("offset", -1)

        def reset_queue(of_queue: tuple[int, int]) -> None:
            queue_id, offset = of_queue
            self._context.offsets.reset(group, topic, {queue_id: offset}, command.now_ms)
            queue = self._context.store.queue(topic, queue_id)
            if queue is not None:  # a suspended pull continues at the new offset
                self._context.long_polling.wake_queue(queue)

        def finish(offsets: OffsetsByQueueId) -> Answer:
            self._context.topics.need(topic)  # it may have been deleted since
            return in_steps(offsets.items(), reset_queue, lambda: self._reply(topic, offsets))

        if queue_id >= 0 and offset != -1:
            self._check_range(topic, queue_id, offset)
            return finish({queue_id: offset})
        queues = range(queue_id, queue_id + 1) if queue_id >= 0 else range(config.read_queue_nums)
        if not queues:
            raise Refused(f"the topic {topic} has no read queues")
        return self._search_offsets(topic, queues, command.i64("timestamp"), finish)

    def clone(self, command: Command) -> Answer:
        """Copy the offsets of a group to another one."""
        context = self._context
        source, target = command.text("srcGroup"), command.text("destGroup")
        topic = command.text_or("topic").strip()
        refuse_internal(topic)
        connected = None if command.truth("offline") else context.clients.consumer_group(source)
        subscribed = connected.subscriptions if connected is not None else {}

        def clone_topic(name: str) -> None:
            unknown = context.topics.get(name) is None or is_internal_topic(name)
            if not unknown and (not subscribed or name in subscribed):
                context.offsets.clone(source, target, name, command.now_ms)

        names = [topic] if topic else context.offsets.topics_of_group(source)
        return in_steps(names, clone_topic, Reply)

    def correction(self, command: Command) -> Answer:
        """For each queue of a topic, the lowest offset of all groups."""
        topic, compared = command.text("topic"), command.text("compareGroup")
        ignored = set(command.text_or("filterGroups").split(","))
        offsets = self._context.offsets
        groups = [group for group in offsets.groups_of_topic(topic) if group not in ignored]
        refuse_too_many_queues(
            f"too many queues of the topic {topic} have offsets",
            max((len(offsets.queues(group, topic)) for group in [*groups, compared]), default=0),
            hint="query the offsets of single groups and queues",
        )
        lowest: OffsetsByQueueId = {}

        def lower(of_queue: tuple[int, int]) -> None:
            queue_id, offset = of_queue
            if offset >= self._context.store.min_offset(topic, queue_id):
                lowest[queue_id] = min(offset, lowest.get(queue_id, offset))

        def compare(of_queue: tuple[int, int]) -> None:
            queue_id, offset = of_queue
            if lowest.get(queue_id, 0) > offset:
                lowest[queue_id] = NO_CORRECTION

        def finish() -> Answer:
            return reply_from_pool(lambda: QueryCorrectionOffsetBody(correction_offsets=lowest))

        others = (
            of_queue for group in groups for of_queue in list(offsets.queues(group, topic).items())
        )
        mine = list(offsets.queues(compared, topic).items())
        return in_steps(others, lower, lambda: in_steps(mine, compare, finish))

    # --- offsets

    def _check_range(self, topic: str, queue_id: int, offset: int) -> None:
        low = self._context.store.min_offset(topic, queue_id)
        high = self._context.store.max_offset(topic, queue_id)
        if not low <= offset <= high:
            raise Refused(
                f"offset {offset} is outside of queue {queue_id} of {topic} ({low} to {high})",
                hint="use an offset in this range, or a time",
            )

    def _search_offsets(
        self,
        topic: str,
        queue_ids: range,
        time_ms: int,
        then: Callable[[OffsetsByQueueId], Answer],
    ) -> Answer:
        """Find the first offset that was stored at a time or later, in each queue."""
        store = self._context.store
        _refuse_too_many(topic, len(queue_ids))
        if time_ms < 0:
            ends: OffsetsByQueueId = {}

            def add_end(queue_id: int) -> None:
                ends[queue_id] = store.max_offset(topic, queue_id)

            return in_steps(queue_ids, add_end, lambda: then(ends))
        queues: dict[int, ConsumeQueue | None] = {}

        def add_queue(queue_id: int) -> None:
            queues[queue_id] = store.queue(topic, queue_id)

        def search() -> Answer:
            confirm_offset = store.confirm_offset

            def work() -> OffsetsByQueueId:
                return {
                    queue_id: 0
                    if queue is None
                    else store.lookup.offset_at(queue, time_ms, confirm_offset=confirm_offset)
                    for queue_id, queue in queues.items()
                }

            return InThread(work, then)

        return in_steps(queue_ids, add_queue, search)

    def _reply(self, topic: str, offsets: OffsetsByQueueId) -> Answer:
        return reply_from_pool(lambda: ResetOffsetBody(offset_table=self._by_queue(topic, offsets)))

    def _by_queue(self, topic: str, offsets: Mapping[int, int]) -> dict[MessageQueue, int]:
        name = self._context.settings.current.broker.name
        return {MessageQueue(topic, name, queue_id): offset for queue_id, offset in offsets.items()}

    # --- client-side reset: consumers are notified and commit the new offsets themselves

    def _reset_by_clients(self, command: Command, config: TopicConfig, group: str) -> Answer:
        topic = config.topic_name
        queue_ids = range(config.write_queue_nums)
        _refuse_too_many(topic, len(queue_ids))
        committed: OffsetsByQueueId = {}

        def add_committed(queue_id: int) -> None:
            offset = self._context.offsets.get(group, topic, queue_id)
            if offset is None:
                raise Refused(f"the group {group} has no offset on queue {queue_id} of {topic}")
            committed[queue_id] = offset

        def finish(found: OffsetsByQueueId) -> Answer:
            return self._notify_clients(command, topic, group, found, committed)

        time_ms = command.i64("timestamp")
        return in_steps(
            queue_ids,
            add_committed,
            lambda: self._search_offsets(topic, queue_ids, time_ms, finish),
        )

    def _notify_clients(
        self,
        command: Command,
        topic: str,
        group: str,
        found: OffsetsByQueueId,
        committed: OffsetsByQueueId,
    ) -> Answer:
        connected = self._context.clients.consumer_group(group)
        members = list(connected.members.values()) if connected is not None else []
        if not members:
            raise ConsumerNotOnline(
                f"no consumer of the group {group} is connected to be notified",
                hint="enable server_side_reset, or start a consumer",
            )
        outdated = [member for member in members if member.version < V3_0_7]
        if outdated:
            raise Refused(f"the client {outdated[0].client_id} is too old to reset its offsets")
        force = command.truth("isForce")
        ext = {
            "topic": topic,
            "group": group,
            "timestamp": command.text("timestamp"),
            "isForce": "true" if force else "false",
        }

        def work() -> tuple[bytes, bytes]:
            # Unless forced, a consumer moves only backwards.
            offsets = {
                queue_id: offset if force else min(offset, committed[queue_id])
                for queue_id, offset in found.items()
            }
            return _bodies(self._by_queue(topic, offsets))

        def notify_all(bodies: tuple[bytes, bytes]) -> Answer:
            java_body, cpp_body = bodies

            def notify(member: GroupMember) -> None:
                body = cpp_body if member.language == LanguageCode.CPP else java_body
                code = RequestCode.RESET_CONSUMER_CLIENT_OFFSET
                self._context.effects.put(NotifyClient(member.client, code, ext, body))

            # The bodies may have megabytes.
            return run_in_steps(
                map(notify, members), lambda: Reply(body=java_body), step_items=NOTIFIED_PER_STEP
            )

        return InThread(work, notify_all)


def _bodies(by_queue: dict[MessageQueue, int]) -> tuple[bytes, bytes]:
    """The new offsets for Java clients, which are also the response to the tool, and for C++."""
    queues = [
        MessageQueueForC(
            topic=queue.topic,
            broker_name=queue.broker_name,
            queue_id=queue.queue_id,
            offset=offset,
        )
        for queue, offset in by_queue.items()
    ]
    return (
        fastjson.encode(ResetOffsetBody(offset_table=by_queue)),
        fastjson.encode(ResetOffsetBodyForC(offset_table=queues)),
    )


def _refuse_too_many(topic: str, queues: int) -> None:
    refuse_too_many_queues(
        f"too many queues of topic {topic} for one reset",
        queues,
        hint="reset single queues (queueId)",
    )
