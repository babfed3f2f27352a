"""Replies with a JSON body."""

from collections.abc import Callable

from penstock.rpc.answers import InThread, Reply
from penstock.wire import fastjson
from penstock.wire.bodies.client_bodies import Body


def reply_with(body: Body) -> Reply:
    """Success, with this body."""
    return Reply(body=fastjson.encode(body))


def reply_from_pool(work: Callable[[], Body]) -> InThread:
    """Success, with the body that `work` returns; it runs and is encoded in the thread pool."""
    return InThread(lambda: fastjson.encode(work()), lambda data: Reply(body=data))
