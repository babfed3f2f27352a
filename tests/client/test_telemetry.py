"""OpenTelemetry's context travels through the brokers of both clusters."""

from __future__ import annotations

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from penstock import Message, ReceivedMessage

from .environment import Environment, Inbox, eventually, running


async def test_a_trace_continues_behind_the_broker(env: Environment) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    topic = env.topic()
    async with env.producer(telemetry=provider) as producer:
        await producer.send(Message(topic, "one"))
        await producer.send_batch([Message(topic, "two"), Message(topic, "three")])
    inbox = Inbox()
    consumer = env.consumer(start_at="first", telemetry=provider)

    @consumer.on(topic)
    async def handle(message: ReceivedMessage) -> None:
        inbox.add(message)

    def processed() -> list[int]:
        found = [s for s in exporter.get_finished_spans() if s.name == f"process {topic}"]
        return [s.parent.span_id for s in found if s.parent] if len(found) == 3 else []

    async with running(consumer):
        await inbox.count(3)
        parents = await eventually(processed)
    sends = [s for s in exporter.get_finished_spans() if s.name == f"send {topic}"]
    one, batch = (span.context.span_id for span in sends)
    assert sorted(parents) == sorted([one, batch, batch])
