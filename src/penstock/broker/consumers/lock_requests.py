"""Requests that lock and unlock queues for ordered consumption."""

from penstock.broker.consumers.groups import Groups
from penstock.broker.consumers.queue_locks import QueueLocks
from penstock.broker.topics import Topics
from penstock.errors import InvalidParameter
from penstock.rpc.answers import Answer, EffectQueue, InThread, PersistSoon, PersistTable, Reply
from penstock.rpc.command import Command
from penstock.rpc.router import Row
from penstock.wire import fastjson
from penstock.wire.bodies.client_bodies import (
    LockBatchRequestBody,
    LockBatchResponseBody,
    MessageQueue,
)
from penstock.wire.codes import RequestCode

BODY_BYTES_MAX = 4 * 1024 * 1024
"""Longest request: enough for `QUEUES_MAX` queues with the longest names."""
QUEUES_MAX = 10_000
"""Most queues of one request: a lock costs some 2 µs."""
CLIENT_ID_MAX = 1_024
"""Longest client id, in characters: the file names it with every lock."""


class LockingHandlers:
    """Answers LOCK_BATCH_MQ and UNLOCK_BATCH_MQ."""

    def __init__(
        self, locks: QueueLocks, groups: Groups, topics: Topics, effects: EffectQueue
    ) -> None:
        self._locks = locks
        self._groups = groups
        self._topics = topics
        self._effects = effects

    def rows(self) -> list[Row]:
        return [
            Row(RequestCode.LOCK_BATCH_MQ, self.lock),
            Row(RequestCode.UNLOCK_BATCH_MQ, self.unlock),
        ]

    def lock(self, command: Command) -> Answer:
        """Lock what is free; the answer has only what the client owns now.

        It leaves when the file knows every owner: a broker that dies must not give a queue to
        another one. Queues that are not there are nobody's, or anybody could fill the memory with
        locks.
        """
        wanted = _read(command)
        self._groups.find(wanted.consumer_group, command.now_ms)
        queues = [queue for queue in wanted.mq_set if self._exists(queue)]
        locks = self._locks
        owned = locks.lock(wanted.consumer_group, wanted.client_id, queues, command.now_ms)
        body = LockBatchResponseBody(lock_ok_mq_set=owned)
        # In the pool, for it may be large: 10,000 queues take 60 ms.
        answer = InThread(lambda: fastjson.encode(body), lambda data: Reply(body=data))
        if locks.are_noted(wanted.consumer_group, owned):
            return answer

        def then(written: bool) -> Answer:
            if written:
                locks.note()
            # A disk that fails does not keep consumers from reading what it holds.
            return answer

        return PersistTable(locks, then)

    def unlock(self, command: Command) -> Answer:
        """Give queues back."""
        wanted = _read(command)
        locks = self._locks
        if locks.unlock(wanted.consumer_group, wanted.client_id, wanted.mq_set):
            self._effects.put(PersistSoon(locks))
        return Reply()

    def _exists(self, queue: MessageQueue) -> bool:
        config = self._topics.get(queue.topic)
        if config is None:
            return False
        return 0 <= queue.queue_id < max(config.read_queue_nums, config.write_queue_nums)


def _read(command: Command) -> LockBatchRequestBody:
    wanted = command.body_as(LockBatchRequestBody, bytes_max=BODY_BYTES_MAX)
    if not wanted.consumer_group or not wanted.client_id:
        raise InvalidParameter("a lock needs consumerGroup and clientId")
    if len(wanted.client_id) > CLIENT_ID_MAX:
        raise InvalidParameter.over(
            "the clientId is too long",
            figure=len(wanted.client_id),
            limit=CLIENT_ID_MAX,
            unit="characters",
            hint="give the client a shorter instance name",
        )
    if len(wanted.mq_set) > QUEUES_MAX:
        raise InvalidParameter.over(
            "too many queues in one request",
            figure=len(wanted.mq_set),
            limit=QUEUES_MAX,
            unit="queues",
            hint="lock them in several requests",
        )
    return wanted
