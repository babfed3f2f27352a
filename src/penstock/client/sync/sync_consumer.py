"""`Consumer` and `PopConsumer`, the synchronous consumers with handlers.

with Consumer("localhost:9876", group="coupons") as consumer:
    @consumer.on("UserRegistered", tags="trial || vip")
    def grant(message): ...
    consumer.run()
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

from penstock.client.client_options import same_arguments_as
from penstock.client.consumer.async_consumer import AsyncConsumer
from penstock.client.messages import SendReceipt
from penstock.client.pop.async_pop_consumer import AsyncPopConsumer
from penstock.client.received_message import ReceivedMessage
from penstock.client.sync.sync_client import blocking, in_loop
from penstock.client.sync.sync_handler_client import SyncHandlerClient


class Consumer(SyncHandlerClient[AsyncConsumer]):
    """Consumes topics for a group. The options are described at `ConsumerOptions`.

    Handlers that are not coroutines run in threads. It cannot be used across a fork.
    """

    @same_arguments_as(AsyncConsumer)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(partial(AsyncConsumer, *args, **kwargs))

    def __iter__(self) -> Iterator[ReceivedMessage]:
        """Messages one by one; a message is acknowledged when the next one is requested.

        `message.retry()` before that lets the broker redeliver it later.
        """
        self.start()
        return self._iterate(aiter(self._client))

    unsubscribe = in_loop(AsyncConsumer.unsubscribe)
    pause = in_loop(AsyncConsumer.pause)
    resume = in_loop(AsyncConsumer.resume)
    queues = in_loop(AsyncConsumer.queues)
    explain = blocking(AsyncConsumer.explain)

    def reply(self, message: ReceivedMessage, body: bytes | str, **fields: Any) -> SendReceipt:
        """Reply to a message that was sent as a request; `fields` are those of Message."""
        return self._run(self._started_client().reply, message, body, **fields)


class PopConsumer(SyncHandlerClient[AsyncPopConsumer]):
    """Receives messages by POP. The options are described at `PopConsumerOptions`."""

    @same_arguments_as(AsyncPopConsumer)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(partial(AsyncPopConsumer, *args, **kwargs))

    receive = blocking(AsyncPopConsumer.receive)
    ack = blocking(AsyncPopConsumer.ack)
    extend = blocking(AsyncPopConsumer.extend)
    explain = blocking(AsyncPopConsumer.explain)
