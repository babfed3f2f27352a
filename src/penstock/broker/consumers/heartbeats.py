"""Requests about who is there: heartbeats, goodbyes, the consumers of a group, filters.

Heartbeats of the second version leave out the subscriptions as long as these do not change, which
a broker allows by answering IS_SUPPORT_HEART_BEAT_V2. We do not allow it: a full heartbeat costs a
broker some 10 µs, and with full ones alone its picture of the subscriptions is right within one
heartbeat after a restart or a lost connection, where the short form takes two and stops the
group's pulls until then. A client that has learned the short form from another broker at this
address is told by IS_SUB_CHANGE to send the full one; until it does, what we know stays.
"""

import logging

from penstock.broker.consumers.clients import Clients, Member
from penstock.broker.consumers.groups import Groups
from penstock.broker.filter.filters import TAG, Filters
from penstock.broker.topics import Topics
from penstock.config import Live
from penstock.errors import InvalidParameter, Refused
from penstock.rpc.answers import Answer, Reply
from penstock.rpc.command import Command
from penstock.rpc.router import Row
from penstock.wire import fastjson
from penstock.wire.bodies.client_bodies import (
    CheckClientRequestBody,
    ConsumerData,
    GetConsumerListByGroupResponseBody,
    HeartbeatData,
)
from penstock.wire.codes import (
    EXT_SUB_CHANGE,
    EXT_SUPPORT_HEARTBEAT_V2,
    PERM_READ_WRITE,
    RETRY_TOPIC_PREFIX,
    RequestCode,
)

log = logging.getLogger(__name__)

BODY_BYTES_MAX = 4 * 1024 * 1024
"""Longest heartbeat: reading it takes some 20 ms."""
GROUPS_MAX = 1_000
"""Most groups of one client: a new one costs some 20 µs, and stays."""
SUBSCRIPTIONS_MAX = 10_000
"""Most subscriptions of one client, each tag counted as one more."""

FULL_HEARTBEATS_ONLY = {EXT_SUPPORT_HEARTBEAT_V2: "false", EXT_SUB_CHANGE: "true"}


class HeartbeatHandlers:
    """Answers what clients say about themselves and ask about each other."""

    def __init__(
        self, settings: Live, clients: Clients, groups: Groups, topics: Topics, filters: Filters
    ) -> None:
        self._settings = settings
        self._clients = clients
        self._groups = groups
        self._topics = topics
        self._filters = filters

    def rows(self) -> list[Row]:
        return [
            Row(RequestCode.HEART_BEAT, self.heartbeat),
            Row(RequestCode.UNREGISTER_CLIENT, self.unregister),
            Row(RequestCode.GET_CONSUMER_LIST_BY_GROUP, self.list_consumers),
            Row(RequestCode.CHECK_CLIENT_CONFIG, self.check_filter),
        ]

    def heartbeat(self, command: Command) -> Answer:
        """Note all groups of a client."""
        data = command.body_as(HeartbeatData, bytes_max=BODY_BYTES_MAX)
        if not data.client_id:
            raise InvalidParameter("the heartbeat names no clientID")
        _check_size(data)
        member = Member(
            command.client,
            data.client_id,
            command.peer,
            command.language,
            command.version,
            command.now_ms,
        )
        for consumer in data.consumer_data_set:
            try:
                self._note_consumer(consumer, member, with_subscriptions=not data.without_sub)
            except Refused as error:
                # The client's other groups must not suffer; this one hears it from its pulls.
                log.warning("%s: heartbeat not taken: %s", data.client_id, error.remark())
        for producer in data.producer_data_set:
            if producer.group_name:
                self._clients.register_producer(producer.group_name, member)
        return Reply(ext=FULL_HEARTBEATS_ONLY)

    def unregister(self, command: Command) -> Answer:
        """A client leaves a group in order."""
        command.text("clientID")
        self._clients.unregister(
            command.client, command.text_or("producerGroup"), command.text_or("consumerGroup")
        )
        return Reply()

    def list_consumers(self, command: Command) -> Answer:
        """The client ids among which the queues of a group are shared."""
        name = command.text("consumerGroup")
        group = self._clients.consumer_group(name)
        if group is None:
            raise Refused(
                f"no consumer for this group, {name}",
                hint="none is connected to this broker; consumers appear with their heartbeat",
            )
        body = GetConsumerListByGroupResponseBody(consumer_id_list=list(group.connections))
        return Reply(body=fastjson.encode(body))

    def check_filter(self, command: Command) -> Answer:
        """Whether a consumer's filter is understood here."""
        subscription = command.body_as(CheckClientRequestBody).subscription_data
        kind = subscription.expression_type if subscription is not None else TAG
        if subscription is not None and kind not in ("", TAG):
            self._filters.check_kind(kind, self._settings.current.broker.property_filter)
            self._filters.get(subscription.sub_string or "")
        return Reply()

    def _note_consumer(
        self, data: ConsumerData, member: Member, *, with_subscriptions: bool
    ) -> None:
        config = self._groups.find(data.group_name, member.seen_ms)
        # Its route must be known as soon as the group is: tools find a group's brokers by it.
        self._topics.ensure(
            RETRY_TOPIC_PREFIX + data.group_name,
            config.retry_queue_nums,
            PERM_READ_WRITE,
            member.seen_ms,
        )
        if self._clients.register_consumer(data, member, with_subscriptions=with_subscriptions):
            log.info(
                "%s (%s) joins or changes %s", member.client_id, member.address, config.group_name
            )


def _check_size(data: HeartbeatData) -> None:
    """Refuse what would keep everybody else waiting."""
    groups = len(data.consumer_data_set) + len(data.producer_data_set)
    if groups > GROUPS_MAX:
        raise InvalidParameter.over(
            f"the client {data.client_id} has too many groups",
            figure=groups,
            limit=GROUPS_MAX,
            unit="groups",
            hint="spread them over several clients with instance names of their own",
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
            hint="subscribe to * instead of so many tags, or spread them over several clients",
        )
