"""Queries of the brokers' message indexes: by key or by unique id, in a time range."""

from collections.abc import Sequence

from penstock.client.admin.admin_core import AdminCore, BrokerResults
from penstock.client.admin.admin_values import BrokerAddress
from penstock.client.received_message import ReceivedMessage, decode_records
from penstock.wire.codes import EXT_UNIQUE_KEY_QUERY, RequestCode, ResponseCode
from penstock.wire.java_numbers import LONG_MAX

FOUND_MAX = 64
"""Messages of one query by key unless specified, as brokers' default."""
_FOUND = (ResponseCode.SUCCESS, ResponseCode.QUERY_NOT_FOUND)


async def query_index(
    core: AdminCore,
    brokers: Sequence[BrokerAddress],
    topic: str,
    key: str,
    *,
    since_ms: int | None = None,
    until_ms: int | None = None,
    count_max: int = FOUND_MAX,
    unique: bool = False,
) -> BrokerResults[list[ReceivedMessage]]:
    """The messages of a topic (with namespace) that each broker finds under a key.

    A broker returns its newest `count_max`. Brokers search by hash: compare ids and keys.
    """
    fields = {
        "topic": topic,
        "key": key,
        "maxNum": str(count_max),
        "beginTimestamp": str(since_ms or 0),
        "endTimestamp": str(LONG_MAX if until_ms is None else until_ms),
        EXT_UNIQUE_KEY_QUERY: "true" if unique else "false",
    }
    found = await core.ask_each(brokers, RequestCode.QUERY_MESSAGE, fields, good=_FOUND)
    messages = [
        (
            broker,
            [m for m in decoded(core, answer.body, broker.name) if m.stored_topic == topic],
        )
        for broker, answer in found.items
        if answer.code == ResponseCode.SUCCESS
    ]
    return BrokerResults(messages, found.unreachable, found.problem)


def decoded(core: AdminCore, body: bytes, broker_name: str) -> list[ReceivedMessage]:
    """The messages in the body of a response."""
    return decode_records(
        body,
        broker_name,
        namespace=core.session.options.namespace,
        received_ms=core.session.clock.now_ms(),
    )
