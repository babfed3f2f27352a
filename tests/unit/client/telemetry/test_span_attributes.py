"""Attributes of messages, and the context in their properties."""

from datetime import UTC, datetime, timedelta

import pytest
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import TracerProvider

from penstock.client.client_options import ClientOptions
from penstock.client.messages import Message
from penstock.client.telemetry.span_attributes import (
    common_topic,
    extract,
    links_of,
    sent_attributes,
    server_attributes,
    with_context,
)
from penstock.client.telemetry.spans import error_type
from penstock.errors import BadSetting, NoRoute

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
OTHER = "00-0af7651916cd43dd8448eb211c80319c-00f067aa0ba902b7-01"


def span_id(context: Context) -> str:
    return f"{trace.get_current_span(context).get_span_context().span_id:016x}"


@pytest.mark.parametrize(
    ("message", "ordering_key", "kind", "more"),
    [
        (Message("T", "x"), None, "normal", {}),
        (Message("T", "x"), "42", "fifo", {"messaging.rocketmq.message.group": "42"}),
        (
            Message("T", "x", delay_level=3),
            None,
            "delay",
            {"messaging.rocketmq.message.delay_time_level": 3},
        ),
        (
            Message("T", "x", deliver_at=datetime(2026, 1, 1, tzinfo=UTC)),
            None,
            "delay",
            {"messaging.rocketmq.message.delivery_timestamp": 1_767_225_600_000},
        ),
        (Message("T", "x", delay=timedelta(seconds=1)), None, "delay", {}),
        (Message("T", "x", properties={"TRAN_MSG": "true"}), None, "transaction", {}),
        (
            Message("T", "x", "tag", ["a", "b"]),
            None,
            "normal",
            {
                "messaging.rocketmq.message.tag": "tag",
                "messaging.rocketmq.message.keys": ["a", "b"],
            },
        ),
    ],
)
def test_attributes_of_a_message_to_send(
    message: Message, ordering_key: str | None, kind: str, more: dict[str, object]
) -> None:
    assert sent_attributes(message, ordering_key) == {
        "messaging.message.body.size": 1,
        "messaging.rocketmq.message.type": kind,
        **more,
    }


def test_the_context_is_in_the_properties_of_a_copy() -> None:
    span = TracerProvider().get_tracer("t").start_span("s")
    message = Message("T", "x", properties={"a": "1"})
    carrying = with_context(message, trace.set_span_in_context(span))
    assert carrying.properties["a"] == "1"
    assert span_id(extract(carrying.properties)) == f"{span.get_span_context().span_id:016x}"
    assert message.properties == {"a": "1"}


def test_a_message_keeps_its_context() -> None:
    message = Message("T", "x", properties={"traceparent": PARENT})
    span = TracerProvider().get_tracer("t").start_span("s")
    assert with_context(message, trace.set_span_in_context(span)) is message


@pytest.mark.parametrize(
    ("properties", "found"),
    [
        ({"traceparent": PARENT}, "b7ad6b7169203331"),
        ({"TRACE_CONTEXT": PARENT}, "b7ad6b7169203331"),
        ({"TRACE_CONTEXT": OTHER, "traceparent": PARENT}, "b7ad6b7169203331"),
        ({"traceparent": "not a context"}, "0" * 16),
        ({}, "0" * 16),
    ],
)
def test_contexts_of_all_clients_are_read(properties: dict[str, str], found: str) -> None:
    assert span_id(extract(properties)) == found


def test_links_are_unique_and_leave_out_messages_without_context() -> None:
    links = links_of([{"traceparent": PARENT}, {}, {"traceparent": PARENT}, {"traceparent": OTHER}])
    assert [f"{link.context.span_id:016x}" for link in links] == [
        "b7ad6b7169203331",
        "00f067aa0ba902b7",
    ]


def test_a_batch_of_several_topics_has_no_destination() -> None:
    assert common_topic([Message("A", "x"), Message("A", "y")]) == "A"
    assert common_topic([Message("A", "x"), Message("B", "y")]) is None


def test_unknown_servers_have_no_address() -> None:
    assert server_attributes(None) == {}
    assert server_attributes("h:10911") == {"server.address": "h", "server.port": 10911}


def test_error_types_name_the_class() -> None:
    assert error_type(ValueError("x")) == "ValueError"
    assert error_type(NoRoute("x")) == "penstock.errors.NoRoute"


def test_without_opentelemetry_the_option_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.client.client_options.find_spec", lambda name: None)
    with pytest.raises(BadSetting, match=r"telemetry needs OpenTelemetry") as refused:
        ClientOptions(telemetry=True)
    assert "pip install '.[otel]'" in (refused.value.hint or "")
    ClientOptions()
