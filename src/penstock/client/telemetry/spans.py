"""Spans of one client.

Kinds and names follow OpenTelemetry's messaging conventions:

    send T       PRODUCER  from the submit to the acknowledgement, over all attempts
    create T     PRODUCER  a message that automatic batching collects; its request is a `send T`
    receive T    CONSUMER  `poll`, `receive` or a step of an iterator that returns messages
    process T    CONSUMER  a call of a handler
    ack T        CLIENT    an acknowledgement that the application requests
    commit T     CLIENT    the end of a transaction; also `rollback T`

The context of `send` or `create` is in the properties of the message. `process` of one message is
its child; `receive`, and `process` of several messages, are linked to it.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import time_ns

from opentelemetry import context as contexts
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, StatusCode, TracerProvider

from penstock.client.client_session import Session
from penstock.client.messages import Message, SendReceipt
from penstock.client.received_message import ReceivedMessage
from penstock.client.telemetry import span_attributes as names
from penstock.client.telemetry.span_attributes import (
    TRACEPARENT,
    Attributes,
    common_topic,
    extract,
    links_of,
    received_attributes,
    sent_attributes,
    server_attributes,
    with_context,
)
from penstock.version import VERSION


class ClientSpans:
    """Starts the spans of one client."""

    def __init__(
        self,
        session: Session,
        provider: TracerProvider | None,
        *,
        group: str | None = None,
        model: str | None = None,
    ) -> None:
        """`group` and `model` ("clustering" or "broadcasting") are those of a consumer."""
        self._session = session
        self._tracer = trace.get_tracer("penstock", VERSION, provider)
        self._common: Attributes = {names.SYSTEM: "rocketmq"}
        if session.options.namespace:
            self._common[names.NAMESPACE] = session.options.namespace
        if group is not None:
            self._common[names.GROUP] = group
        if model is not None:
            self._common[names.MODEL] = model

    # --- producers

    def create(self, message: Message) -> Message:
        """A message that is sent later, with the context of its own `create` span."""
        if TRACEPARENT in message.properties:
            return message
        given = self._attributes("create", "create", message.topic)
        given.update(sent_attributes(message, None))
        span = self._tracer.start_span(f"create {message.topic}", None, SpanKind.PRODUCER, given)
        span.end()
        return with_context(message, trace.set_span_in_context(span))

    def send(self, message: Message, ordering_key: str | None) -> tuple["SendSpan", Message]:
        """Start the span of a send; returns it and the message with its context."""
        given = sent_attributes(message, ordering_key)
        return self._start_send([message], given)

    def send_batch(self, messages: Sequence[Message]) -> tuple["SendSpan", list[Message]]:
        """Start the span of a batch; returns it and the messages with its context."""
        span, _ = self._start_send(messages, {names.BATCH_COUNT: len(messages)})
        return span, [with_context(message, span.context) for message in messages]

    def _start_send(
        self, messages: Sequence[Message], given: Attributes
    ) -> tuple["SendSpan", Message]:
        topic = common_topic(messages)
        created = [message.properties for message in messages if TRACEPARENT in message.properties]
        span = self._tracer.start_span(
            _name("send", topic),
            None,
            SpanKind.PRODUCER if len(created) < len(messages) else SpanKind.CLIENT,
            self._attributes("send", "send", topic, given),
            links_of(created) if created else None,
        )
        sending = SendSpan(span, self._session)
        return sending, with_context(messages[0], sending.context)

    @contextmanager
    def batch_context(self, messages: Sequence[Message]) -> Iterator[None]:
        """The context of a request with collected messages: that of a single one, else none."""
        context = extract(messages[0].properties) if len(messages) == 1 else Context()
        token = contexts.attach(context)
        try:
            yield
        finally:
            contexts.detach(token)

    @contextmanager
    def ending(self, decision: str, topic: str, message_id: str) -> Iterator[None]:
        """The span of a commit or rollback."""
        with self._settling(decision, topic, message_id, None):
            yield

    # --- consumers

    def received(self, messages: Sequence[ReceivedMessage], started_ns: int) -> None:
        """Messages were passed to the application, which has asked for them at `started_ns`."""
        topic = common_topic(messages)
        given = self._attributes("receive", "receive", topic)
        given[names.BATCH_COUNT] = len(messages)
        given.update(self._server(messages[0]))
        self._tracer.start_span(
            _name("receive", topic),
            None,
            SpanKind.CONSUMER,
            given,
            links_of([message.properties for message in messages]),
            start_time=started_ns,
        ).end()

    def now_ns(self) -> int:
        """The time for `received`."""
        return time_ns()

    def process(self, messages: Sequence[ReceivedMessage], *, batch: bool = False) -> "ProcessSpan":
        """Start the span of a handler call, and make it the current one."""
        first = messages[0]
        given = self._attributes("process", "process", first.topic)
        given.update(self._server(first))
        parent = Context()
        if batch:
            given[names.BATCH_COUNT] = len(messages)
        else:
            given.update(received_attributes(first))
            parent = extract(first.properties)
        span = self._tracer.start_span(
            _name("process", first.topic),
            parent,
            SpanKind.CONSUMER,
            given,
            links_of([message.properties for message in messages]),
        )
        return ProcessSpan(span, trace.set_span_in_context(span, parent))

    @contextmanager
    def acking(self, message: ReceivedMessage) -> Iterator[None]:
        """The span of an acknowledgement."""
        with self._settling("ack", message.topic, message.message_id, message.properties):
            yield

    # --- attributes

    @contextmanager
    def _settling(
        self, operation: str, topic: str, message_id: str, properties: Mapping[str, str] | None
    ) -> Iterator[None]:
        given = self._attributes(operation, "settle", topic, {names.MESSAGE_ID: message_id})
        links = None if properties is None else links_of([properties])
        span = self._tracer.start_span(_name(operation, topic), None, SpanKind.CLIENT, given, links)
        with trace.use_span(span, end_on_exit=True):
            try:
                yield
            except BaseException as error:
                span.set_attribute(names.ERROR_TYPE, error_type(error))
                raise

    def _attributes(
        self, name: str, kind: str, topic: str | None, more: Attributes | None = None
    ) -> Attributes:
        found = dict(self._common)
        found[names.OPERATION_NAME] = name
        found[names.OPERATION_TYPE] = kind
        found[names.CLIENT_ID] = self._session.client_id
        if topic is not None:
            found[names.DESTINATION] = topic
        if more is not None:
            found.update(more)
        return found

    def _server(self, message: ReceivedMessage) -> Attributes:
        return server_attributes(self._session.master_address(message.broker_name))


class SendSpan:
    """The span of a send in progress."""

    def __init__(self, span: Span, session: Session) -> None:
        self._span = span
        self._session = session
        self.context = trace.set_span_in_context(span)

    def sent(self, receipt: SendReceipt, *, batch: bool = False) -> None:
        """The broker has acknowledged the message, or a batch whose first receipt this is."""
        span = self._span
        if span.is_recording():
            queue = receipt.queue
            if not batch:
                span.set_attribute(names.MESSAGE_ID, receipt.message_id)
            span.set_attribute(names.PARTITION, str(queue.queue_id))
            address = self._session.master_address(queue.broker_name)
            span.set_attributes(server_attributes(address))
            if receipt.status.value:  # stored, but a flush or a replica timed out
                span.add_event(receipt.status.name)
        span.end()

    def written(self) -> None:
        """A one-way request was written."""
        self._span.end()

    def failed(self, error: BaseException) -> None:
        """The message was not acknowledged."""
        set_error(self._span, error)
        self._span.end()


class ProcessSpan:
    """The span of a handler call. It is current in the task that started it, until `end`."""

    def __init__(self, span: Span, context: Context) -> None:
        self._span = span
        self._token = contexts.attach(context)

    def failed(self, error: BaseException) -> None:
        """The handler has raised."""
        set_error(self._span, error)

    def end(self, *, retried: bool) -> None:
        """The handler has returned; `retried`: a message will be redelivered."""
        contexts.detach(self._token)
        if retried:
            self._span.add_event("redelivery requested")
        self._span.end()


def set_error(span: Span, error: BaseException) -> None:
    """Mark a span as failed."""
    span.set_attribute(names.ERROR_TYPE, error_type(error))
    span.record_exception(error)
    span.set_status(StatusCode.ERROR, f"{type(error).__name__}: {error}")


def error_type(error: BaseException) -> str:
    """The name of an exception class, with its module."""
    kind = type(error)
    if kind.__module__ == "builtins":
        return kind.__qualname__
    return f"{kind.__module__}.{kind.__qualname__}"


def _name(operation: str, topic: str | None) -> str:
    return operation if topic is None else f"{operation} {topic}"
