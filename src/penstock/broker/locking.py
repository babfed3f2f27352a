"""Requests that lock and unlock queues for ordered consumption."""

from penstock.broker.answers import Answer, Reply
from penstock.broker.command import Command
from penstock.broker.parts import Parts
from penstock.broker.router import Row
from penstock.errors import InvalidParameter
from penstock.wire import fastjson
from penstock.wire.bodies import LockBatchRequestBody, LockBatchResponseBody
from penstock.wire.codes import RequestCode


class LockingHandlers:
    """Answers LOCK_BATCH_MQ and UNLOCK_BATCH_MQ."""

    def __init__(self, parts: Parts) -> None:
        self._locks = parts.locks

    def rows(self) -> list[Row]:
        return [
            Row(RequestCode.LOCK_BATCH_MQ, self.lock),
            Row(RequestCode.UNLOCK_BATCH_MQ, self.unlock),
        ]

    def lock(self, command: Command) -> Answer:
        """Lock what is free; the answer has only what the client owns now."""
        wanted = _read(command)
        owned = self._locks.lock(
            wanted.consumer_group, wanted.client_id, wanted.mq_set, command.now_ms
        )
        return Reply(body=fastjson.encode(LockBatchResponseBody(lock_ok_mq_set=owned)))

    def unlock(self, command: Command) -> Answer:
        """Give queues back."""
        wanted = _read(command)
        self._locks.unlock(wanted.consumer_group, wanted.client_id, wanted.mq_set)
        return Reply()


def _read(command: Command) -> LockBatchRequestBody:
    wanted = command.body_as(LockBatchRequestBody)
    if not wanted.consumer_group or not wanted.client_id:
        raise InvalidParameter("a lock needs consumerGroup and clientId")
    return wanted
