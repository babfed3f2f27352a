"""Penstock: a message broker in Python that speaks Apache RocketMQ's protocol and files.

    from penstock import Message, Producer

    with Producer("localhost:9876", group="signup") as producer:
        producer.send(Message("UserRegistered", b'{"id": 42}'))

The clients are those of `penstock.client`; each is loaded when it is asked for.
"""

import os as _os

TYPE_CHECKING = False  # tools take it for typing's own, which would take 8 ms to load
if TYPE_CHECKING:
    from penstock.client import (
        Admin,
        AsyncAdmin,
        AsyncConsumer,
        AsyncPopConsumer,
        AsyncProducer,
        AsyncPullConsumer,
        AsyncTransactionProducer,
        Batching,
        Consumer,
        Decision,
        Message,
        MessageQueue,
        PopConsumer,
        Producer,
        PullConsumer,
        ReceivedMessage,
        Retry,
        SendReceipt,
        SendStatus,
        TransactionHandle,
        TransactionProducer,
    )
    from penstock.errors import PenstockError

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
    "PenstockError",
    "PopConsumer",
    "Producer",
    "PullConsumer",
    "ReceivedMessage",
    "Retry",
    "SendReceipt",
    "SendStatus",
    "TransactionHandle",
    "TransactionProducer",
    "compiled",
]

__version__ = "0.1.0"

if _os.environ.get("PENSTOCK_PURE") == "1":
    from penstock import purity as _purity

    _purity.install()


def compiled() -> bool:
    """Whether the per-message kernel runs as machine code (else: the same Python, slower)."""
    from penstock.wire import frame

    return not frame.__file__.endswith(".py")


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    home = import_module("penstock.errors" if name == "PenstockError" else "penstock.client")
    found = globals()[name] = getattr(home, name)
    return found


def __dir__() -> list[str]:
    return [*globals(), *__all__]
