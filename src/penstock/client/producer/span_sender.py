"""Sends of a producer with `telemetry`: each has a span, and its message carries the context.

A producer without `telemetry` uses `Sender`, so it does not even check for spans.
"""

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.client.client_session import Session
from penstock.client.messages import Message, MessageQueue, SendReceipt
from penstock.client.producer.producer_options import SendOptions
from penstock.client.producer.publish_info import QueueSelector
from penstock.client.producer.sending import Sender
from penstock.errors import PenstockError

if TYPE_CHECKING:
    from penstock.client.telemetry.spans import ClientSpans, SendSpan


class SpanSender(Sender):
    """A sender that starts a span for each send."""

    def __init__(
        self, session: Session, group: str, options: SendOptions, spans: "ClientSpans"
    ) -> None:
        super().__init__(session, group, options)
        self._spans = spans

    def submit(
        self,
        message: Message,
        *,
        queue: MessageQueue | None = None,
        ordering_key: str | None = None,
        selector: QueueSelector | None = None,
        timeout_ms: int | None = None,
        internal: bool = False,
        traced: bool = True,
    ) -> "asyncio.Future[SendReceipt]":
        """As `Sender.submit`; a message that is not traced has no span either."""
        span: SendSpan | None = None
        if traced:
            span, message = self._spans.send(message, ordering_key)
        try:
            future = super().submit(
                message,
                queue=queue,
                ordering_key=ordering_key,
                selector=selector,
                timeout_ms=timeout_ms,
                internal=internal,
                traced=traced,
            )
        except BaseException as error:
            if span is not None:
                span.failed(error)
            raise
        if span is not None:
            future.add_done_callback(lambda done: _finish(span, done))
        return future

    async def send_oneway(
        self,
        message: Message,
        *,
        queue: MessageQueue | None = None,
        ordering_key: str | None = None,
        selector: QueueSelector | None = None,
        timeout_ms: int | None = None,
    ) -> None:
        """As `Sender.send_oneway`."""
        span, message = self._spans.send(message, ordering_key)
        try:
            await super().send_oneway(
                message,
                queue=queue,
                ordering_key=ordering_key,
                selector=selector,
                timeout_ms=timeout_ms,
            )
        except BaseException as error:
            span.failed(error)
            raise
        span.written()

    async def send_each(
        self,
        messages: Sequence[Message],
        *,
        queue: MessageQueue | None = None,
        ordering_key: str | None = None,
        selector: QueueSelector | None = None,
        timeout_ms: int | None = None,
    ) -> list[SendReceipt | PenstockError]:
        """As `Sender.send_each`, with one span for all messages."""
        if not messages:
            return []
        span, messages = self._spans.send_batch(messages)
        try:
            results = await super().send_each(
                messages,
                queue=queue,
                ordering_key=ordering_key,
                selector=selector,
                timeout_ms=timeout_ms,
            )
        except BaseException as error:
            span.failed(error)
            raise
        first = next((result for result in results if isinstance(result, PenstockError)), None)
        if first is not None:
            span.failed(first)
        elif isinstance(results[0], SendReceipt):
            span.sent(results[0], batch=True)
        return results


def _finish(span: "SendSpan", done: "asyncio.Future[SendReceipt]") -> None:
    if done.cancelled():
        span.failed(asyncio.CancelledError("the send was cancelled"))
        return
    error = done.exception()
    if error is not None:
        span.failed(error)
    else:
        span.sent(done.result())
