"""Calls the application's handlers: coroutines on the loop, other functions in threads."""

import asyncio
from collections.abc import Awaitable, Callable
from contextvars import ContextVar, copy_context
from functools import partial
from typing import TYPE_CHECKING, cast

from penstock.client.client_session import Session
from penstock.client.consumer.dispatch.completion import Completion
from penstock.client.consumer.dispatch.handler_threads import HandlerThreads, Result
from penstock.client.consumer.dispatch.handlers import Handlers, Retry, retry_from_result
from penstock.client.consumer.dispatch.message_runs import no_handler_error
from penstock.client.received_message import ReceivedMessage
from penstock.client.trace.trace_writer import ConsumeCode, Tracer

if TYPE_CHECKING:
    from penstock.client.telemetry.spans import ClientSpans

_HANDLING: ContextVar[tuple[Completion, ...]] = ContextVar("penstock_handling", default=())
"""The consumers whose handlers run in this task, or in a task that started it."""


class HandlerCalls:
    """Calls handlers for ordered queues, for tools, and for observed consumers."""

    def __init__(
        self,
        handlers: Handlers,
        completion: Completion,
        tracer: Tracer | None,
        *,
        name: str,
        threads: int,
        spans: "ClientSpans | None" = None,
    ) -> None:
        self._handlers = handlers
        self._completion = completion
        self.tracer = tracer
        self._spans = spans
        self.observed = tracer is not None or spans is not None
        """Whether each call of a handler is traced, or has a span."""
        self._threads: HandlerThreads[_ThreadCall] = HandlerThreads(
            name, threads, run=lambda call: call.function(call.argument), done=_complete_call
        )

    async def handle(self, messages: list[ReceivedMessage]) -> Retry | None:
        """Call the handler of these messages (of one queue); returns None if they are done."""
        token = self.tracer.consuming(messages) if self.tracer is not None else None
        span = None
        if self._spans is not None:
            span = self._spans.process(messages, batch=self._handlers.takes_list)
        code = ConsumeCode.SUCCESS
        try:
            result = retry_from_result(await self.call(messages))
        except BaseException as error:
            if span is not None:
                span.failed(error)
            if ends_task(error):
                if span is not None:
                    span.end(retried=True)
                raise
            self._completion.log_failure(messages, error)
            result, code = Retry(), ConsumeCode.EXCEPTION
        if self.observed:
            failed = result is not None or any(
                message.retry_level is not None for message in messages
            )
            if failed and code is ConsumeCode.SUCCESS:
                code = ConsumeCode.FAILED
            if self.tracer is not None:
                self.tracer.consumed(token, code)
            if span is not None:
                span.end(retried=failed)
        return result

    async def call(self, messages: list[ReceivedMessage]) -> object:
        """The result of the handler; raises what the handler raises."""
        handler = self._handlers.find(messages[0])
        if handler is None:
            raise no_handler_error(messages[0])
        argument = handler.argument(messages)
        if handler.is_async:
            mark_handling(self._completion)
            return await cast(Awaitable[object], handler.function(argument))
        function = handler.function
        if self._spans is not None:  # the span is current in the thread as well
            context = copy_context()
            context.run(_HANDLING.set, ())  # it is not an async handler
            function = partial(context.run, function)
        call = _ThreadCall(function, argument, asyncio.get_running_loop().create_future())
        self._threads.submit((call,))
        return await call.returned

    async def close(self, session: Session, drain_ms: int) -> None:
        await self._threads.close(session.clock, drain_ms)


class _ThreadCall:
    """A call in a thread and the future of its result."""

    __slots__ = ("argument", "function", "returned")

    def __init__(
        self, function: Callable[..., object], argument: object, returned: asyncio.Future[object]
    ) -> None:
        self.function = function
        self.argument = argument
        self.returned = returned


def _complete_call(result: Result[_ThreadCall]) -> None:
    returned = result.job.returned
    if returned.done():
        return
    if result.error is None:
        returned.set_result(result.value)
    elif isinstance(result.error, Exception) and not isinstance(result.error, StopIteration):
        returned.set_exception(result.error)
    else:
        returned.set_exception(
            RuntimeError(f"the handler raised {type(result.error).__name__}: {result.error}")
        )


def mark_handling(completion: Completion) -> None:
    """Note that handlers of this consumer run in the current task."""
    handling = _HANDLING.get()
    if completion not in handling:
        _HANDLING.set((*handling, completion))


def is_handling(completion: Completion) -> bool:
    """Whether the caller runs in an async handler of this consumer, or in a task of one."""
    return completion in _HANDLING.get()


def ends_task(error: BaseException) -> bool:
    """Whether an exception of a handler ends the worker task, or the whole program.

    A cancellation of something inside the handler does not: it is a failure of the handler.
    """
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        return task is not None and task.cancelling() > 0
    return isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit)
