"""The least that the send path needs around it: every queue that exists may be sent to."""

from penstock.errors import TopicNotExist
from penstock.rpc.answers import Answer, EncodedReply
from penstock.rpc.command import Command
from penstock.rpc.router import unsupported
from penstock.store.consumequeue.consumequeue import ConsumeQueue
from penstock.store.store import MessageStore


class OpenGate:
    """Lets everything pass."""

    creations = 0

    def __init__(self, store: MessageStore) -> None:
        self._store = store

    def admit(
        self, topic: str, queue_id: int, *, template: str, template_queues: int, now_ms: int
    ) -> ConsumeQueue:
        queue = self._store.queue(topic, queue_id)
        if queue is None:
            raise TopicNotExist(f"{topic} has no such queue")
        queue.taking = True
        return queue

    def announced(self, topic: str, answer: EncodedReply, now_ms: int) -> Answer:
        return answer


class Straight:
    """Knows no detours."""

    def place(self, topic: str, queue_id: int, properties: dict[str, str], **rest: object) -> None:
        return None

    def check_room(self, record_bytes: int, parked: int, topic: str) -> None: ...


class Nothing:
    """A service that knows no request."""

    def handle(self, command: Command) -> Answer:
        return unsupported(command.code)

    def connected(self, client: int, peer: str, now_ms: int) -> None: ...

    def disconnected(self, client: int, now_ms: int) -> None: ...

    def due(self) -> int:
        return 0

    def tick(self, now_ms: int) -> None: ...
