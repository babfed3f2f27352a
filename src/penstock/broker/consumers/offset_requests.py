"""Requests about progress: consumer offsets, and where a queue begins, ends and was at a time."""

from penstock.broker.consumers.consumer_offsets import Offsets
from penstock.broker.consumers.groups import Groups
from penstock.broker.topics import Topics
from penstock.errors import GroupNotExist, InvalidParameter, QueryNotFound
from penstock.rpc.answers import Answer, InThread, Reply
from penstock.rpc.command import Command
from penstock.rpc.router import Row
from penstock.store.store import MessageStore
from penstock.wire.codes import RequestCode


class ProgressHandlers:
    """Answers questions about offsets, and notes commits."""

    def __init__(
        self, store: MessageStore, offsets: Offsets, groups: Groups, topics: Topics
    ) -> None:
        self._store = store
        self._offsets = offsets
        self._groups = groups
        self._topics = topics

    def rows(self) -> list[Row]:
        return [
            Row(RequestCode.QUERY_CONSUMER_OFFSET, self.query),
            Row(RequestCode.UPDATE_CONSUMER_OFFSET, self.commit),
            Row(RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, self.search),
            Row(RequestCode.GET_MAX_OFFSET, self.tell_max),
            Row(RequestCode.GET_MIN_OFFSET, self.tell_min),
            Row(RequestCode.GET_EARLIEST_MSG_STORETIME, self.tell_earliest),
        ]

    # --- of a group

    def query(self, command: Command) -> Answer:
        """Where a group goes on; QUERY_NOT_FOUND lets the client decide where it begins."""
        offsets = self._offsets
        group, topic = command.text("consumerGroup"), command.text("topic")
        queue_id = command.i32("queueId")
        offset = offsets.get(group, topic, queue_id)
        if offset is not None and offset >= 0:
            return _offset(offset)
        nothing = QueryNotFound(
            f"the group {group} has no progress on queue {queue_id} of {topic} yet",
            hint="it begins where the consumer says (consumeFromWhere)",
        )
        look = offsets.starts_young(topic, queue_id)
        if look is None or not command.truth("setZeroIfNotFound", True):
            raise nothing

        def begin(young: bool) -> Answer:
            if not young:
                raise nothing
            return _offset(0)

        return InThread(look, begin)

    def commit(self, command: Command) -> Answer:
        """Note how far a group has come."""
        group, topic = command.text("consumerGroup"), command.text("topic")
        if self._groups.get(group) is None:
            raise GroupNotExist(f"the group {group} does not exist here")
        config = self._topics.need(topic)
        queue_id, offset = command.i32("queueId"), command.i64("commitOffset")
        count = max(config.read_queue_nums, config.write_queue_nums)
        # A topic may have had more queues than now, and their consumers end what they began.
        if queue_id < 0 or (queue_id >= count and self._store.queue(topic, queue_id) is None):
            raise InvalidParameter(f"{topic} has no queue {queue_id}, only {count} of them")
        if offset < 0:
            raise InvalidParameter(f"an offset is at least 0, not {offset}")
        if self._offsets.commit(group, topic, queue_id, offset, command.now_ms):
            return Reply()
        return Reply(remark="ignored: the offset was reset, and no consumer has pulled there yet")

    # --- of a queue

    def search(self, command: Command) -> Answer:
        """The offset at a time: the first message since (LOWER), or the last one until (UPPER)."""
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

    def tell_max(self, command: Command) -> Answer:
        """One past the newest message that consumers may see."""
        return _offset(self._store.max_offset(command.text("topic"), command.i32("queueId")))

    def tell_min(self, command: Command) -> Answer:
        """The oldest message that is still there."""
        return _offset(self._store.min_offset(command.text("topic"), command.i32("queueId")))

    def tell_earliest(self, command: Command) -> Answer:
        """Store time of the oldest message that is still there; -1 if there is none."""
        store = self._store
        queue = store.queue(command.text("topic"), command.i32("queueId"))
        if queue is None:
            return _timestamp(-1)
        return InThread(lambda: store.lookup.earliest_ms(queue), _timestamp)


def _offset(offset: int) -> Reply:
    return Reply(ext={"offset": str(offset)})


def _timestamp(ms: int) -> Reply:
    return Reply(ext={"timestamp": str(ms)})
