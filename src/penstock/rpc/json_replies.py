"""Replies whose body is one of the typed JSON bodies."""

from collections.abc import Callable

from penstock.rpc.answers import InThread, Reply
from penstock.wire import fastjson
from penstock.wire.bodies.client_bodies import Body


def reply_with(body: Body) -> Reply:
    """Success, with this body."""
    return Reply(body=fastjson.encode(body))


def reply_from_pool(work: Callable[[], Body]) -> InThread:
    """The body that `work` makes in the pool; it is encoded there too, for it may be large."""
    return InThread(lambda: fastjson.encode(work()), lambda data: Reply(body=data))
