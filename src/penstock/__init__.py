"""Penstock: a message broker in Python that speaks Apache RocketMQ's protocol and files.

    from penstock import Message, Producer

    with Producer("localhost:9876", group="signup") as producer:
        producer.send(Message("UserRegistered", b'{"id": 42}'))

The clients come from `penstock.client`. Each is loaded on first use.
"""

import os as _os

from penstock import version as _version

TYPE_CHECKING = False  # type checkers treat it as typing's; importing typing takes 8 ms
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

__version__ = _version.VERSION

if _os.environ.get("PENSTOCK_PURE") == "1":
    from penstock import purity as _purity

    _purity.install()


def compiled() -> bool:
    """Whether the per-message path runs compiled; uncompiled it is the same Python, but slower."""
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
