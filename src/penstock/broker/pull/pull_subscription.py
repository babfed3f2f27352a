"""What a pull wants: the tags or the filter of its subscription, and the refusal of wrong ones.

The subscription is that of the group's last heartbeat, unless the request carries its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from penstock.broker.context import BrokerContext
from penstock.broker.filter.filtered_read import FilteredReader, RecordFilter
from penstock.broker.filter.filters import TAG, Filter
from penstock.broker.filter.retry_filter import with_owner
from penstock.errors import BadFilter, NoPermission, PenstockError, Refused
from penstock.store import get
from penstock.store.get import Reader
from penstock.wire.bodies.client_bodies import SubscriptionData
from penstock.wire.codes import PULL_SUBSCRIPTION, ResponseCode
from penstock.wire.frame import Request
from penstock.wire.record import java_hash

# `forbiddenType` of a refused pull.
FORBIDDEN_BROKER, FORBIDDEN_GROUP, FORBIDDEN_TOPIC = 1, 2, 3
FORBIDDEN_BROADCAST, FORBIDDEN_SUBSCRIPTION = 4, 5


class PullForbidden(NoPermission):
    """A pull that is not allowed; `kind` is the `forbiddenType` in the response."""

    def __init__(self, message: str, kind: int, hint: str) -> None:
        super().__init__(message, hint=hint)
        self.kind = kind


class SubscriptionError(PenstockError):
    """A subscription that is unknown, out of date or not valid."""

    hint = "send a heartbeat with the subscription first"

    def __init__(self, code: int, message: str, *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.wire_code = code


class Wanted(NamedTuple):
    """Which messages are wanted: those with tags of these hash codes that match the filter."""

    tag_hashes: Sequence[int] = ()
    filter: RecordFilter | None = None

    def for_group(self, topic: str, group: str) -> Wanted:
        """What a group that reads this topic wants of it: in a retry topic, only its messages."""
        own = with_owner(self.filter, topic, group)
        return self if own is self.filter else self._replace(filter=own)


ALL = Wanted()


class PullSubscriptions:
    """Finds out what pulls want."""

    def __init__(self, context: BrokerContext) -> None:
        self._context = context

    def wanted(self, request: Request, group: str, topic: str, flags: int) -> Wanted:
        """What a pull of this group wants; raises SubscriptionError and PullForbidden."""
        if flags & PULL_SUBSCRIPTION:
            kind = request.text(b"expressionType") or TAG
            expression = request.text(b"subscription") or ""
            if kind == TAG:
                return Wanted(tag_hashes_of(expression))
            code = ResponseCode.SUBSCRIPTION_PARSE_FAILED
            return Wanted(filter=self._filter(kind, expression, code))
        subscription = self._subscription(request, group, topic)
        if subscription.class_filter_mode:
            return ALL
        kind = subscription.expression_type or TAG
        if kind != TAG:
            code = ResponseCode.FILTER_DATA_NOT_EXIST
            return Wanted(filter=self._filter(kind, subscription.sub_string or "", code))
        if subscription.sub_string == "*":
            return ALL
        # One more than the maximum is enough: the broker then does not filter.
        return Wanted(sorted(subscription.code_set)[: get.TAG_HASHES_MAX + 1])

    def _filter(self, kind: str, expression: str, invalid_code: int) -> Filter:
        """The compiled filter; an invalid one is refused with `invalid_code`."""
        context = self._context
        try:
            context.filters.check_kind(kind, context.settings.current.broker.property_filter)
            return context.filters.get(expression)
        except Refused as error:
            code = invalid_code if isinstance(error, BadFilter) else error.code
            raise SubscriptionError(code, error.message, hint=error.hint) from None

    def _subscription(self, request: Request, group: str, topic: str) -> SubscriptionData:
        context = self._context
        members = context.clients.consumer_group(group)
        if members is None:
            raise SubscriptionError(
                ResponseCode.SUBSCRIPTION_NOT_EXIST,
                f"no consumer of the group {group} is connected here",
            )
        config = context.groups.get(group)
        broadcast = members.message_model == "BROADCASTING"
        if config is not None and broadcast and not config.consume_broadcast_enable:
            raise PullForbidden(
                f"the group {group} may not use broadcasting",
                FORBIDDEN_BROADCAST,
                "enable it with mqadmin updateSubGroup -d true",
            )
        if not context.groups.may_read(group, topic):
            raise PullForbidden(
                f"the group {group} may not read the topic {topic}",
                FORBIDDEN_SUBSCRIPTION,
                "an administrator has forbidden it; mqadmin can allow it again",
            )
        subscription = context.clients.subscription(group, topic)
        if subscription is None:
            raise SubscriptionError(
                ResponseCode.SUBSCRIPTION_NOT_EXIST,
                f"the group {group} does not subscribe to the topic {topic}: all its consumers "
                "must subscribe to the same topics",
            )
        if subscription.sub_version < request.i64_or(b"subVersion", 0):
            raise SubscriptionError(
                ResponseCode.SUBSCRIPTION_NOT_LATEST,
                f"the newest subscription of the group {group} to {topic} has not arrived yet",
            )
        return subscription


def reader_for(reader: Reader, wanted: Wanted) -> Reader | FilteredReader:
    """A reader that finds only wanted messages."""
    # Clients check the tags too, so with too many tags the broker need not filter.
    reader.set_tag_hashes(wanted.tag_hashes if len(wanted.tag_hashes) <= get.TAG_HASHES_MAX else ())
    return reader if wanted.filter is None else FilteredReader(reader, wanted.filter)


def tag_hashes_of(expression: str) -> Sequence[int]:
    """Hash codes of the tags of an expression such as `a || b`; empty for all messages."""
    if expression.strip() in ("", "*"):
        return ()
    if expression.count("||") >= get.TAG_HASHES_MAX:
        return ()  # too many to filter here; clients check the tags too
    tags = [tag.strip() for tag in expression.split("||")]
    tag_hashes = {java_hash(tag) for tag in tags if tag}
    if not tag_hashes:
        raise SubscriptionError(
            ResponseCode.SUBSCRIPTION_PARSE_FAILED,
            f"{expression[:80]!r} contains no tag",
            hint='separate tags by "||", or use "*" for all messages',
        )
    return sorted(tag_hashes)
