"""Spans of all kinds of clients, and the traces that they form."""

import asyncio
import gzip
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from functools import wraps
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from penstock import (
    AsyncConsumer,
    AsyncPopConsumer,
    AsyncProducer,
    AsyncPullConsumer,
    AsyncTransactionProducer,
    Consumer,
    Message,
    Producer,
    ReceivedMessage,
    Retry,
)
from penstock.client.telemetry import context_of, processing
from penstock.errors import PenstockError
from penstock.testing import InProcessBroker

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def on_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @wraps(test)
    def run(**fixtures: Any) -> None:
        asyncio.run(test(**fixtures))

    return run


class Spans:
    """Collects the spans of one test."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.exporter.get_finished_spans() if span.name == name]

    def one(self, name: str) -> ReadableSpan:
        (span,) = self.named(name)
        return span

    def work(self) -> Any:
        """A span of the application around its work."""
        return self.provider.get_tracer("app").start_as_current_span("work")


@pytest.fixture(scope="module")
def broker() -> Iterator[InProcessBroker]:
    with InProcessBroker() as broker:
        yield broker
        broker.topics()  # its loop has seen the ends of all connections


@pytest.fixture
def spans() -> Spans:
    return Spans()


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def is_child(span: ReadableSpan, parent: ReadableSpan) -> bool:
    return (
        span.parent is not None
        and span.parent.span_id == parent.context.span_id
        and span.context.trace_id == parent.context.trace_id
    )


def is_linked(span: ReadableSpan, other: ReadableSpan) -> bool:
    return any(link.context.span_id == other.context.span_id for link in span.links)


def test_a_send_and_its_handler_are_one_trace(broker: InProcessBroker, spans: Spans) -> None:
    seen: list[tuple[int, str]] = []
    consumer = Consumer(
        broker.address, group="trace-sync", start_at="first", telemetry=spans.provider
    )

    @consumer.on("Traced")
    def handle(message: ReceivedMessage) -> None:
        seen.append(
            (trace.get_current_span().get_span_context().span_id, threading.current_thread().name)
        )

    with Producer(broker.address, telemetry=spans.provider) as producer:
        with spans.work():
            receipt = producer.send(
                Message("Traced", "hello", tags="new", keys=["k1", "k2"]), ordering_key="42"
            )
        with consumer:
            broker.wait_until(lambda: spans.named("process Traced"))
    work, send, process = (spans.one(name) for name in ("work", "send Traced", "process Traced"))
    assert is_child(send, work)
    assert is_child(process, send)
    assert is_linked(process, send)
    assert (send.kind, process.kind) == (SpanKind.PRODUCER, SpanKind.CONSUMER)
    assert seen[0][0] == process.context.span_id
    assert seen[0][1].startswith("penstock-trace-sync"), "the handler ran in a thread"
    sent, handled = attributes(send), attributes(process)
    host, _, port = broker.broker_address.rpartition(":")
    for found in (sent, handled):
        assert found["messaging.system"] == "rocketmq"
        assert found["messaging.destination.name"] == "Traced"
        assert found["messaging.destination.partition.id"] == str(receipt.queue.queue_id)
        assert found["messaging.message.id"] == receipt.message_id
        assert found["messaging.message.body.size"] == 5
        assert found["messaging.rocketmq.message.tag"] == "new"
        assert found["messaging.rocketmq.message.keys"] == ("k1", "k2")
        assert found["messaging.rocketmq.message.type"] == "fifo"
        assert found["messaging.rocketmq.message.group"] == "42"
        assert found["server.address"] == host
        assert found["server.port"] == int(port)
        assert found["messaging.client.id"]
    assert sent["messaging.operation.name"] == sent["messaging.operation.type"] == "send"
    assert handled["messaging.operation.type"] == "process"
    assert handled["messaging.consumer.group.name"] == "trace-sync"
    assert handled["messaging.rocketmq.consumption_model"] == "clustering"
    (stored,) = broker.messages("Traced")
    assert stored.properties["traceparent"].split("-")[1] == f"{send.context.trace_id:032x}"


@on_loop
async def test_a_redelivery_belongs_to_the_same_trace(
    broker: InProcessBroker, spans: Spans
) -> None:
    consumer = AsyncConsumer(
        broker.address, group="trace-retry", start_at="first", telemetry=spans.provider
    )

    @consumer.on("Retried")
    async def handle(message: ReceivedMessage) -> None:
        if message.reconsume_times == 0:
            raise ValueError("as the test wants it")

    async with AsyncProducer(broker.address, telemetry=spans.provider) as producer:
        await producer.send(Message("Retried", "x"))
    async with consumer:
        await broker.wait_until(lambda: broker.retries("trace-retry") or _delayed(broker))
        await broker.clock.advance(minutes=1)
        await broker.wait_until(lambda: len(spans.named("process Retried")) == 2)
    first, second = spans.named("process Retried")
    send = spans.one("send Retried")
    assert is_child(first, send)
    assert is_child(second, send)
    assert first.status.status_code is StatusCode.ERROR
    assert attributes(first)["error.type"] == "ValueError"
    assert [event.name for event in first.events] == ["exception", "redelivery requested"]
    assert second.status.status_code is StatusCode.UNSET
    assert not second.events


def _delayed(broker: InProcessBroker) -> list[ReceivedMessage]:
    return broker.messages("SCHEDULE_TOPIC_XXXX")


@pytest.mark.parametrize("orderly", [False, True])
@on_loop
async def test_a_handler_of_batches_is_linked_to_each_send(
    broker: InProcessBroker, spans: Spans, orderly: bool
) -> None:
    topic = f"Batch{orderly}"
    broker.create_topic(topic, queues=1)
    async with AsyncProducer(broker.address, telemetry=spans.provider) as producer:
        for number in range(2):
            await producer.send(Message(topic, str(number)))
        await producer.send_batch([Message(topic, "2"), Message(topic, "3")])
    counts: list[int] = []
    consumer = AsyncConsumer(
        broker.address,
        group=f"trace-batch-{orderly}",
        start_at="first",
        handle_batch=8,
        orderly=orderly,
        telemetry=spans.provider,
    )

    @consumer.on(topic)
    async def handle(messages: list[ReceivedMessage]) -> Retry | None:
        counts.append(len(messages))
        return None

    async with consumer:
        await broker.wait_until(
            lambda: (
                sum(
                    attributes(span)["messaging.batch.message_count"]
                    for span in spans.named(f"process {topic}")
                )
                == 4
            )
        )
    sends = spans.named(f"send {topic}")
    assert [attributes(span).get("messaging.batch.message_count") for span in sends] == [
        None,
        None,
        2,
    ]
    processed = spans.named(f"process {topic}")
    links = [link.context.span_id for span in processed for link in span.links]
    assert set(links) == {span.context.span_id for span in sends}
    assert all(span.parent is None for span in processed)
    assert sum(counts) == 4


@on_loop
async def test_batching_creates_a_context_for_each_message(
    broker: InProcessBroker, spans: Spans
) -> None:
    async with AsyncProducer(broker.address, batching=True, telemetry=spans.provider) as producer:
        with spans.work():
            await asyncio.gather(*(producer.send(Message("Collected", f"{n}")) for n in range(3)))
    created = spans.named("create Collected")
    assert len(created) == 3
    assert all(is_child(span, spans.one("work")) for span in created)
    send = spans.one("send Collected")
    assert send.kind is SpanKind.CLIENT
    assert send.parent is None
    assert all(is_linked(send, span) for span in created)
    carried = {
        message.properties["traceparent"].split("-")[2] for message in broker.messages("Collected")
    }
    assert carried == {f"{span.context.span_id:016x}" for span in created}


@on_loop
async def test_a_context_of_the_application_is_kept(broker: InProcessBroker, spans: Spans) -> None:
    message = Message("Forwarded", "x", properties={"traceparent": TRACEPARENT})
    async with AsyncProducer(broker.address, telemetry=spans.provider) as producer:
        await producer.send(message)
        await producer.send_oneway(Message("Forwarded", "one-way"))
        await broker.wait_until(lambda: len(broker.messages("Forwarded")) == 2)
    kept = [m for m in broker.messages("Forwarded") if m.body == b"x"]
    assert kept[0].properties["traceparent"] == TRACEPARENT
    first, oneway = spans.named("send Forwarded")
    assert first.kind is SpanKind.CLIENT
    assert [f"{link.context.span_id:016x}" for link in first.links] == [TRACEPARENT.split("-")[2]]
    assert oneway.kind is SpanKind.PRODUCER
    assert message.properties == {"traceparent": TRACEPARENT}, "the message is not changed"


@on_loop
async def test_a_failed_send_has_its_error(broker: InProcessBroker, spans: Spans) -> None:
    async with AsyncProducer(
        broker.address, telemetry=spans.provider, create_topics=False
    ) as producer:
        with pytest.raises(PenstockError):
            await producer.send(Message("NoSuchTopic", "x"))
        with pytest.raises(PenstockError):
            await producer.send(Message("NoSuchTopic", ""))
    missing, empty = spans.named("send NoSuchTopic")
    assert missing.status.status_code is StatusCode.ERROR
    assert attributes(missing)["error.type"] == "penstock.errors.NoRoute"
    assert attributes(empty)["error.type"] == "penstock.errors.MessageIllegal"


@on_loop
async def test_polls_and_iterators_create_receive_spans(
    broker: InProcessBroker, spans: Spans
) -> None:
    async with AsyncProducer(broker.address, telemetry=spans.provider) as producer:
        await producer.send(Message("Polled", "x"))
    send = spans.one("send Polled")
    async with AsyncPullConsumer(
        broker.address, group="trace-pull", start_at="first", telemetry=spans.provider
    ) as consumer:
        consumer.subscribe("Polled")
        with spans.work():
            (message,) = await consumer.poll()
    receive = spans.one("receive Polled")
    assert receive.kind is SpanKind.CONSUMER
    assert is_child(receive, spans.one("work"))
    assert is_linked(receive, send)
    assert attributes(receive)["messaging.batch.message_count"] == 1
    assert trace.get_current_span(context_of(message)).get_span_context().span_id == (
        send.context.span_id
    )
    with processing(message, provider=spans.provider) as current:
        assert trace.get_current_span() is current
    with suppress(KeyError), processing(message, provider=spans.provider):
        raise KeyError("x")
    process, failed = spans.named("process Polled")
    assert is_child(process, send)
    assert attributes(failed)["error.type"] == "KeyError"
    iterator = AsyncConsumer(
        broker.address, group="trace-for", start_at="first", telemetry=spans.provider
    )
    iterator.subscribe("Polled")
    async with iterator:
        async for _ in iterator:
            break
    assert len(spans.named("receive Polled")) == 2


@on_loop
async def test_pop_consumers_have_receive_process_and_ack_spans(
    broker: InProcessBroker, spans: Spans
) -> None:
    broker.create_topic("Popped", queues=1)
    async with AsyncProducer(broker.address, telemetry=spans.provider) as producer:
        await producer.send(Message("Popped", "first"))
        async with AsyncPopConsumer(
            broker.address, group="trace-pop", start_at="first", telemetry=spans.provider
        ) as consumer:
            consumer.subscribe("Popped")
            (message,) = await consumer.receive()
            await consumer.ack(message)
        await producer.send(Message("Popped", "second"))
    first, second = spans.named("send Popped")
    ack = spans.one("ack Popped")
    assert is_linked(spans.one("receive Popped"), first)
    assert is_linked(ack, first)
    assert attributes(ack)["messaging.operation.type"] == "settle"

    current: list[int] = []
    runner = AsyncPopConsumer(
        broker.address, group="trace-pop", start_at="first", telemetry=spans.provider
    )

    @runner.on("Popped")
    def handle(message: ReceivedMessage) -> None:
        current.append(trace.get_current_span().get_span_context().span_id)

    running = asyncio.ensure_future(runner.run())
    await broker.wait_until(lambda: spans.named("process Popped"))
    await runner.close()
    await running
    process = spans.one("process Popped")
    assert is_child(process, second)
    assert current == [process.context.span_id]


@on_loop
async def test_transactions_carry_the_context_of_the_half_message(
    broker: InProcessBroker, spans: Spans
) -> None:
    async with AsyncTransactionProducer(
        broker.address, group="trace-tx", telemetry=spans.provider
    ) as producer:
        with spans.work():
            async with producer.transaction(Message("Settled", "x")):
                pass
    work, send, commit = (spans.one(n) for n in ("work", "send Settled", "commit Settled"))
    assert is_child(send, work)
    assert is_child(commit, work)
    assert attributes(send)["messaging.rocketmq.message.type"] == "transaction"
    (stored,) = broker.messages("Settled")
    assert stored.properties["traceparent"].split("-")[2] == f"{send.context.span_id:016x}"
    consumer = AsyncConsumer(
        broker.address, group="trace-tx-c", start_at="first", telemetry=spans.provider
    )

    @consumer.on("Settled")
    async def handle(message: ReceivedMessage) -> None:
        pass

    async with consumer:
        await broker.wait_until(lambda: spans.named("process Settled"))
    process = spans.one("process Settled")
    assert is_child(process, send)
    assert attributes(process)["messaging.rocketmq.message.type"] == "transaction"


def test_a_send_in_a_handler_continues_the_trace(broker: InProcessBroker, spans: Spans) -> None:
    with Producer(broker.address, telemetry=spans.provider) as producer:
        consumer = Consumer(
            broker.address, group="trace-chain", start_at="first", telemetry=spans.provider
        )

        @consumer.on("Baskets")
        def bill(message: ReceivedMessage) -> None:
            producer.send(Message("Bills", message.body))

        producer.send(Message("Baskets", "42"))
        with consumer:
            broker.wait_until(lambda: spans.named("process Baskets"))
    assert is_child(spans.one("send Bills"), spans.one("process Baskets"))
    assert spans.one("send Bills").context.trace_id == spans.one("send Baskets").context.trace_id


@on_loop
async def test_clients_without_telemetry_create_no_spans(
    broker: InProcessBroker, spans: Spans
) -> None:
    async with AsyncProducer(broker.address) as producer:
        with spans.work():
            await producer.send(Message("Plain", "x"))
    (message,) = broker.messages("Plain")
    assert "traceparent" not in message.properties
    assert [span.name for span in spans.exporter.get_finished_spans()] == ["work"]


class Collector(ThreadingHTTPServer):
    """Accepts OTLP over HTTP, and keeps the names of the spans."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _CollectorRequest)
        self.names: list[str] = []
        self.port = self.server_address[1]


class _CollectorRequest(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        request = ExportTraceServiceRequest.FromString(body)
        self.server.names += [
            span.name
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.slow
def test_the_examples_of_the_page_run_and_export(
    broker: InProcessBroker, collector: Collector
) -> None:
    page = Path(__file__).parents[2] / "docs" / "telemetry.md"
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) == 2
    for block in blocks:
        program = block.replace("localhost:9876", broker.address).replace(
            "localhost:4318", f"127.0.0.1:{collector.port}"
        )
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", program], capture_output=True, timeout=120
        )
        assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout == b"b'42'\n"
    names = ["checkout", "process Orders", "send Orders"]
    assert sorted(name for name in collector.names if name != "receive Orders") == names
