"""For applications that fetch messages themselves: the span of their processing."""

from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, TracerProvider

from penstock.client.received_message import ReceivedMessage
from penstock.client.telemetry import span_attributes as names
from penstock.client.telemetry.span_attributes import extract, links_of, received_attributes
from penstock.client.telemetry.spans import error_type
from penstock.version import VERSION


def context_of(message: ReceivedMessage) -> Context:
    """The context that the producer has put into a message; empty if there is none."""
    return extract(message.properties)


@contextmanager
def processing(
    message: ReceivedMessage, *, provider: TracerProvider | None = None
) -> Iterator[Span]:
    """A `process` span around the processing of one message, as a child of its send.

    Push consumers and POP consumers with handlers create this span themselves.
    """
    context = extract(message.properties)
    tracer = trace.get_tracer("penstock", VERSION, provider)
    given = received_attributes(message)
    given[names.SYSTEM] = "rocketmq"
    given[names.OPERATION_NAME] = given[names.OPERATION_TYPE] = "process"
    span = tracer.start_span(
        f"process {message.topic}",
        context,
        SpanKind.CONSUMER,
        given,
        links_of([message.properties]),
    )
    with trace.use_span(span, end_on_exit=True):
        try:
            yield span
        except BaseException as error:
            span.set_attribute(names.ERROR_TYPE, error_type(error))
            raise
