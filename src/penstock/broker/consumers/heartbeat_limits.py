"""Limits of one heartbeat.

A heartbeat beyond a limit is refused as a whole: the client is faulty or hostile.
The characters of producer groups and topics are not checked, because clients in some languages
allow more of them than the broker's tables do.
"""

from penstock.broker.consumers.client_groups import CLIENT_ID_MAX
from penstock.broker.filter.filter_parser import CHARS_MAX as SQL_CHARS_MAX
from penstock.broker.filter.filters import TAG
from penstock.errors import InvalidParameter
from penstock.wire.bodies.client_bodies import ConsumerData, HeartbeatData

BODY_BYTES_MAX = 4 * 1024 * 1024
"""Maximum size of a heartbeat: decoding it takes about 20 ms."""
GROUPS_MAX = 1_000
"""Maximum number of groups of one client: a new group takes about 0.3 ms, and stays."""
SUBSCRIPTIONS_MAX = 10_000
"""Maximum number of subscriptions of one client; each tag counts as one more."""
NAME_CHARS_MAX = 255
"""Maximum length of a group or topic in a heartbeat, as in RocketMQ's clients."""
TAGS_CHARS_MAX = 256 * 1024
"""Maximum length of the tags of one subscription: enough for SUBSCRIPTIONS_MAX of them."""
WORD_CHARS_MAX = 64
"""Maximum length of a field that holds a keyword, such as CLUSTERING."""


def check_heartbeat(data: HeartbeatData) -> None:
    """Raise InvalidParameter if the heartbeat is beyond a limit."""
    if not data.client_id:
        raise InvalidParameter("the heartbeat has no clientID")
    _check_length("the clientID", data.client_id, CLIENT_ID_MAX, "choose a shorter instance name")
    for producer in data.producer_data_set:
        _check_length("the name of a producer group", producer.group_name, NAME_CHARS_MAX)
    for consumer in data.consumer_data_set:
        _check_consumer(consumer)
    _check_counts(data)


def _check_consumer(consumer: ConsumerData) -> None:
    _check_length("the name of a consumer group", consumer.group_name, NAME_CHARS_MAX)
    _check_length("the consumeType", consumer.consume_type, WORD_CHARS_MAX)
    _check_length("the messageModel", consumer.message_model, WORD_CHARS_MAX)
    _check_length("the consumeFromWhere", consumer.consume_from_where, WORD_CHARS_MAX)
    for subscription in consumer.subscription_data_set:
        _check_length("the topic of a subscription", subscription.topic, NAME_CHARS_MAX)
        _check_length("the expressionType", subscription.expression_type, WORD_CHARS_MAX)
        by_tags = subscription.expression_type in ("", TAG)
        chars_max = TAGS_CHARS_MAX if by_tags else SQL_CHARS_MAX
        _check_length("the subString of a subscription", subscription.sub_string, chars_max)
        chars = sum(map(len, subscription.tags_set))
        _refuse_over("the tagsSet of a subscription", chars, TAGS_CHARS_MAX)


def _check_length(what: str, text: str | None, limit: int, hint: str | None = None) -> None:
    if text is not None:
        _refuse_over(what, len(text), limit, hint)


def _refuse_over(what: str, figure: int, limit: int, hint: str | None = None) -> None:
    if figure > limit:
        raise InvalidParameter.over(
            f"{what} is too long", figure=figure, limit=limit, unit="characters", hint=hint
        )


def _check_counts(data: HeartbeatData) -> None:
    """Refuse a heartbeat that would block the event loop for too long."""
    groups = len(data.consumer_data_set) + len(data.producer_data_set)
    if groups > GROUPS_MAX:
        raise InvalidParameter.over(
            f"the client {data.client_id} has too many groups",
            figure=groups,
            limit=GROUPS_MAX,
            unit="groups",
            hint="use several clients with different instance names",
        )
    subscriptions = sum(
        1 + max(len(subscription.tags_set), len(subscription.code_set))
        for consumer in data.consumer_data_set
        for subscription in consumer.subscription_data_set
    )
    if subscriptions > SUBSCRIPTIONS_MAX:
        raise InvalidParameter.over(
            f"the client {data.client_id} has too many subscriptions and tags",
            figure=subscriptions,
            limit=SUBSCRIPTIONS_MAX,
            unit="of them",
            hint="subscribe to * instead of these tags, or spread them over several clients",
        )
