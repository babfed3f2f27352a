"""Clients of RocketMQ and Penstock clusters: asynchronous ones, and the same for code that blocks.

Everything here is loaded when it is asked for. What they have to say goes to the logger "penstock".
"""

import logging
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.client.accumulator import Batching
    from penstock.client.admin import AsyncAdmin
    from penstock.client.admin_face import Admin
    from penstock.client.consumer import AsyncConsumer
    from penstock.client.consumer_face import Consumer, PopConsumer
    from penstock.client.handlers import Retry
    from penstock.client.message import Message, MessageQueue, SendReceipt, SendStatus
    from penstock.client.pop import AsyncPopConsumer
    from penstock.client.producer import AsyncProducer
    from penstock.client.producer_face import Producer, TransactionProducer
    from penstock.client.pull import AsyncPullConsumer
    from penstock.client.pull_face import PullConsumer
    from penstock.client.records import ReceivedMessage
    from penstock.client.transaction import AsyncTransactionProducer
    from penstock.client.transaction_handle import Decision, TransactionHandle

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

_HOMES = {
    "Admin": "admin_face",
    "AsyncAdmin": "admin",
    "AsyncConsumer": "consumer",
    "AsyncPopConsumer": "pop",
    "AsyncProducer": "producer",
    "AsyncPullConsumer": "pull",
    "AsyncTransactionProducer": "transaction",
    "Batching": "accumulator",
    "Consumer": "consumer_face",
    "Decision": "transaction_handle",
    "Message": "message",
    "MessageQueue": "message",
    "PopConsumer": "consumer_face",
    "Producer": "producer_face",
    "PullConsumer": "pull_face",
    "ReceivedMessage": "records",
    "Retry": "handlers",
    "SendReceipt": "message",
    "SendStatus": "message",
    "TransactionHandle": "transaction_handle",
    "TransactionProducer": "producer_face",
}

logging.getLogger("penstock").addHandler(logging.NullHandler())


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(f"{__name__}.{home}"), name)
    return found


def __dir__() -> list[str]:
    return [*globals(), *__all__]
