"""Requests for offsets: those of consumers, and of a queue's start, end and any time."""

from penstock.broker.consumers.consumer_offsets import ConsumerOffsets
from penstock.broker.consumers.groups import Groups
from penstock.broker.consumers.offset_commits import OffsetCommits
from penstock.broker.topics import Topics, refuse_internal
from penstock.errors import GroupNotExist, InvalidParameter, QueryNotFound
from penstock.rpc.answers import Answer, InThread, Reply
from penstock.rpc.command import Command
from penstock.rpc.router import Row
from penstock.store.store import MessageStore
from penstock.wire.codes import RequestCode


class OffsetRequests:
    """Handles queries and commits of offsets."""

    def __init__(
        self, store: MessageStore, offsets: ConsumerOffsets, groups: Groups, topics: Topics
    ) -> None:
        self._store = store
        self._offsets = offsets
        self._groups = groups
        self._topics = topics
        self._commits = OffsetCommits(self, offsets, store, topics.table, groups.table)

    def rows(self) -> list[Row]:
        return [
            Row(RequestCode.QUERY_CONSUMER_OFFSET, self.query),
            Row(RequestCode.UPDATE_CONSUMER_OFFSET, self.commit, self._commits),
            Row(RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, self.search),
            Row(RequestCode.GET_MAX_OFFSET, self.max_offset),
            Row(RequestCode.GET_MIN_OFFSET, self.min_offset),
            Row(RequestCode.GET_EARLIEST_MSG_STORETIME, self.earliest_store_time),
        ]

    # --- consumer offsets

    def query(self, command: Command) -> Answer:
        """QUERY_CONSUMER_OFFSET; on QUERY_NOT_FOUND the client chooses where to start."""
        offsets = self._offsets
        group, topic = command.text("consumerGroup"), command.text("topic")
        queue_id = command.i32("queueId")
        offset = offsets.get(group, topic, queue_id)
        if offset is not None and offset >= 0:
            return _offset(offset)
        nothing = QueryNotFound(
            f"the group {group} has no offset on queue {queue_id} of {topic}",
            hint="the consumer starts according to its consumeFromWhere",
        )
        if not command.truth("setZeroIfNotFound", True):
            raise nothing

        def begin(at_zero: bool) -> Answer:
            if not at_zero:
                raise nothing
            return _offset(0)

        at_zero = offsets.starts_at_zero(topic, queue_id)
        return begin(at_zero) if isinstance(at_zero, bool) else InThread(at_zero, begin)

    def commit(self, command: Command) -> Answer:
        """UPDATE_CONSUMER_OFFSET."""
        group, topic = command.text("consumerGroup"), command.text("topic")
        if self._groups.get(group) is None:
            raise GroupNotExist(f"the group {group} does not exist on this broker")
        refuse_internal(topic)
        config = self._topics.need(topic)
        queue_id, offset = command.i32("queueId"), command.i64("commitOffset")
        count = max(config.read_queue_nums, config.write_queue_nums)
        # The topic may have had more queues before, whose consumers finish their work.
        if queue_id < 0 or (queue_id >= count and self._store.queue(topic, queue_id) is None):
            raise InvalidParameter(f"{topic} has no queue {queue_id}: it has {count} queues")
        if offset < 0:
            raise InvalidParameter(f"the offset must not be negative: {offset}")
        if self._offsets.commit(group, topic, queue_id, offset, command.now_ms):
            return Reply()
        return Reply(remark="ignored: an offset reset is pending until the next pull")

    # --- offsets of a queue

    def search(self, command: Command) -> Answer:
        """SEARCH_OFFSET_BY_TIMESTAMP: the first message since (LOWER) or last until (UPPER)."""
        store = self._store
        queue = store.queue(command.text("topic"), command.i32("queueId"))
        ms = command.i64("timestamp")
        upper = command.text_or("boundaryType").upper() == "UPPER"
        if queue is None:
            return _offset(0)
        confirm_offset = store.confirm_offset
        return InThread(
            lambda: store.lookup.offset_at(queue, ms, confirm_offset=confirm_offset, upper=upper),
            _offset,
        )

    def max_offset(self, command: Command) -> Answer:
        """GET_MAX_OFFSET: the offset after the newest visible message."""
        return _offset(self._store.max_offset(command.text("topic"), command.i32("queueId")))

    def min_offset(self, command: Command) -> Answer:
        """GET_MIN_OFFSET: the offset of the oldest message."""
        return _offset(self._store.min_offset(command.text("topic"), command.i32("queueId")))

    def earliest_store_time(self, command: Command) -> Answer:
        """GET_EARLIEST_MSG_STORETIME: store time of the oldest message; -1 if there is none."""
        store = self._store
        queue = store.queue(command.text("topic"), command.i32("queueId"))
        if queue is None:
            return _timestamp(-1)
        return InThread(lambda: store.lookup.earliest_ms(queue), _timestamp)


def _offset(offset: int) -> Reply:
    return Reply(ext={"offset": str(offset)})


def _timestamp(ms: int) -> Reply:
    return Reply(ext={"timestamp": str(ms)})
