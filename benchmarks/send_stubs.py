"""Stubs for the send path: every existing queue is writable."""

from penstock.errors import TopicNotExist
from penstock.rpc.answers import Answer, EncodedReply
from penstock.rpc.command import Command
from penstock.rpc.router import unsupported
from penstock.store.consumequeue.consumequeue import ConsumeQueue
from penstock.store.store import MessageStore


class WritableTopics:
    """Every existing queue is writable."""

    creations = 0

    def __init__(self, store: MessageStore) -> None:
        self._store = store

    def writable_queue(
        self,
        topic: str,
        queue_id: int,
        *,
        template: str,
        template_queues: int,
        client: int,
        now_ms: int,
    ) -> ConsumeQueue:
        queue = self._store.queue(topic, queue_id)
        if queue is None:
            raise TopicNotExist(f"{topic} has no such queue")
        queue.writable = True
        return queue

    def priority_queue(self, topic: str, priority: int, now_ms: int) -> ConsumeQueue:
        raise TopicNotExist(f"{topic} has no priority queues")

    def reply_when_registered(self, topic: str, reply: EncodedReply, now_ms: int) -> Answer:
        return reply


class NoRedirects:
    """No message is redirected."""

    def find_redirect(
        self, topic: str, queue_id: int, properties: dict[str, str], **rest: object
    ) -> None:
        return None

    def check_length(self, record_bytes: int, topic_bytes: int, topic: str) -> None: ...


class EmptyService:
    """A service that handles only the requests of the fast path."""

    def handle(self, command: Command) -> Answer:
        return unsupported(command.code)

    def connected(self, client: int, peer: str, now_ms: int) -> None: ...

    def disconnected(self, client: int, now_ms: int) -> None: ...

    def due(self) -> int:
        return 0

    def tick(self, now_ms: int) -> None: ...
