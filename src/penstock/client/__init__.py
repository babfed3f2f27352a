"""Clients of RocketMQ and Penstock clusters: asyncio classes and their synchronous counterparts.

Classes are imported on first use. All loggers are below "penstock".
"""

import logging
from typing import TYPE_CHECKING

from penstock.lazy import lazy_exports

if TYPE_CHECKING:
    from penstock.client.admin.async_admin import AsyncAdmin
    from penstock.client.consumer.async_consumer import AsyncConsumer
    from penstock.client.consumer.dispatch.handlers import Retry
    from penstock.client.messages import Message, MessageQueue, SendReceipt, SendStatus
    from penstock.client.pop.async_pop_consumer import AsyncPopConsumer
    from penstock.client.producer.accumulator import Batching
    from penstock.client.producer.async_producer import AsyncProducer
    from penstock.client.pull.async_pull_consumer import AsyncPullConsumer
    from penstock.client.received_message import ReceivedMessage
    from penstock.client.sync.sync_admin import Admin
    from penstock.client.sync.sync_consumer import Consumer, PopConsumer
    from penstock.client.sync.sync_producer import Producer, TransactionProducer
    from penstock.client.sync.sync_pull_consumer import PullConsumer
    from penstock.client.transaction.async_transaction_producer import AsyncTransactionProducer
    from penstock.client.transaction.transaction_handle import Decision, TransactionHandle

__all__ = [
    "Admin",
    "AsyncAdmin",
    "AsyncConsumer",
    "AsyncPopConsumer",
    "AsyncProducer",
    "AsyncPullConsumer",
    "AsyncTransactionProducer",
    "Batching",
    "Consumer",
    "Decision",
    "Message",
    "MessageQueue",
    "PopConsumer",
    "Producer",
    "PullConsumer",
    "ReceivedMessage",
    "Retry",
    "SendReceipt",
    "SendStatus",
    "TransactionHandle",
    "TransactionProducer",
]

_MODULES = {
    "Admin": "sync.sync_admin",
    "AsyncAdmin": "admin.async_admin",
    "AsyncConsumer": "consumer.async_consumer",
    "AsyncPopConsumer": "pop.async_pop_consumer",
    "AsyncProducer": "producer.async_producer",
    "AsyncPullConsumer": "pull.async_pull_consumer",
    "AsyncTransactionProducer": "transaction.async_transaction_producer",
    "Batching": "producer.accumulator",
    "Consumer": "sync.sync_consumer",
    "Decision": "transaction.transaction_handle",
    "Message": "messages",
    "MessageQueue": "messages",
    "PopConsumer": "sync.sync_consumer",
    "Producer": "sync.sync_producer",
    "PullConsumer": "sync.sync_pull_consumer",
    "ReceivedMessage": "received_message",
    "Retry": "consumer.dispatch.handlers",
    "SendReceipt": "messages",
    "SendStatus": "messages",
    "TransactionHandle": "transaction.transaction_handle",
    "TransactionProducer": "sync.sync_producer",
}

__getattr__ = lazy_exports(__name__, _MODULES)

logging.getLogger("penstock").addHandler(logging.NullHandler())


def __dir__() -> list[str]:
    return [*globals(), *__all__]
