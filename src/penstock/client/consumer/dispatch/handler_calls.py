"""Calls of the application's handlers, one at a time for each caller."""

import asyncio
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import cast

from penstock.client.client_session import Session
from penstock.client.consumer.dispatch.completion import Settling
from penstock.client.consumer.dispatch.handler_threads import HandlerThreads, Result
from penstock.client.consumer.dispatch.handlers import Handlers, Retry, verdict
from penstock.client.received_message import ReceivedMessage
from penstock.client.trace.trace_writer import ConsumeCode, Tracer
from penstock.errors import ClientError

_INSIDE: ContextVar[tuple[Settling, ...]] = ContextVar("penstock_inside", default=())
"""In tasks that run handlers, and in those that handlers start: whose they are."""


class Calls:
    """Calls handlers of both kinds: for ordered queues, for tools, and where traces are written."""

    def __init__(
        self,
        handlers: Handlers,
        settling: Settling,
        tracer: Tracer | None,
        *,
        name: str,
        threads: int,
    ) -> None:
        self._handlers = handlers
        self._settling = settling
        self.tracer = tracer
        self._threads: HandlerThreads[_Call] = HandlerThreads(
            name, threads, run=lambda call: call.function(call.argument), done=_return
        )

    async def handle(self, messages: list[ReceivedMessage]) -> Retry | None:
        """Call the handler of these messages (of one queue): None for done."""
        token = self.tracer.consuming(messages) if self.tracer is not None else None
        code = ConsumeCode.SUCCESS
        try:
            result = verdict(await self.call(messages))
        except BaseException as error:
            if is_end(error):
                raise
            self._settling.complain(messages, error)
            result, code = Retry(), ConsumeCode.EXCEPTION
        if self.tracer is not None:
            failed = result is not None or any(message.again is not None for message in messages)
            if failed and code is ConsumeCode.SUCCESS:
                code = ConsumeCode.FAILED
            self.tracer.consumed(token, code)
        return result

    async def call(self, messages: list[ReceivedMessage]) -> object:
        """What the handler returns; raises what it raises."""
        handler = self._handlers.find(messages[0])
        if handler is None:
            raise no_handler(messages[0])
        argument = handler.argument(messages)
        if handler.is_async:
            enter(self._settling)
            return await cast(Awaitable[object], handler.function(argument))
        call = _Call(handler.function, argument, asyncio.get_running_loop().create_future())
        self._threads.submit((call,))
        return await call.returned

    async def close(self, session: Session, drain_ms: int) -> None:
        await self._threads.close(session.clock, drain_ms)


class _Call:
    """One call in a thread, and who waits for it."""

    __slots__ = ("argument", "function", "returned")

    def __init__(
        self, function: Callable[..., object], argument: object, returned: asyncio.Future[object]
    ) -> None:
        self.function = function
        self.argument = argument
        self.returned = returned


def _return(result: Result[_Call]) -> None:
    returned = result.job.returned
    if returned.done():
        return
    if result.error is None:
        returned.set_result(result.value)
    elif isinstance(result.error, Exception) and not isinstance(result.error, StopIteration):
        returned.set_exception(result.error)
    else:
        returned.set_exception(RuntimeError(f"the handler ended with {result.error!r}"))


def no_handler(message: ReceivedMessage) -> ClientError:
    """The error for a message that nobody is there for: one that comes again, mostly."""
    return ClientError(
        f"no handler for the topic {message.topic!r}",
        hint="messages of a topic that is no longer handled come again until they are dead letters",
    )


def enter(settling: Settling) -> None:
    """Handlers of this consumer run in this task from now on."""
    inside = _INSIDE.get()
    if settling not in inside:
        _INSIDE.set((*inside, settling))


def is_handling(settling: Settling) -> bool:
    """Whether the caller is an async handler of this consumer, or was started by one."""
    return settling in _INSIDE.get()


def is_end(error: BaseException) -> bool:
    """Whether what a handler raises is meant for the running task, or the whole program.

    Not so a cancellation of something inside the handler: that is the handler's failure.
    """
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        return task is not None and task.cancelling() > 0
    return isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit)
