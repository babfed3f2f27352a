"""Heartbeats, unregistration, the consumers of a group, and the check of filters.

Heartbeats of version 2 omit unchanged subscriptions, if the broker responds with
IS_SUPPORT_HEART_BEAT_V2. Penstock does not support them: a full heartbeat that repeats the last one
costs about 5 µs (`repeated_heartbeats`), and after a restart or a lost connection the subscriptions
are correct after one full heartbeat. The short form needs two, and the group can't pull until then.
A client that learned the short form from another broker at this address is told by IS_SUB_CHANGE to
send the full form; until then its known subscriptions stay.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from penstock.broker.consumers.client_groups import GroupMember
from penstock.broker.consumers.clients import Clients
from penstock.broker.consumers.groups import Groups
from penstock.broker.consumers.heartbeat_limits import (
    BODY_BYTES_MAX,
    GROUPS_MAX,
    check_heartbeat,
)
from penstock.broker.consumers.repeated_heartbeats import AppliedHeartbeat
from penstock.broker.filter.filters import TAG, Filters
from penstock.broker.topics import Topics
from penstock.config import LiveSettings
from penstock.errors import Refused, SystemBusy
from penstock.rpc.answers import Answer, Reply
from penstock.rpc.command import Command
from penstock.rpc.router import Row
from penstock.rpc.steps import run_in_steps
from penstock.wire.bodies.client_bodies import (
    CheckClientRequestBody,
    ConsumerData,
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

GROUPS_PER_STEP = 10
"""Groups that are registered before other clients are served: a new one takes about 0.3 ms."""
UNFINISHED_BYTES_MAX = 16 * 1024 * 1024
"""Bytes of heartbeats that are registered in steps; beyond it, groups are registered at once."""
FULL_HEARTBEATS_ONLY = {EXT_SUPPORT_HEARTBEAT_V2: "false", EXT_SUB_CHANGE: "true"}


class HeartbeatHandlers:
    """Handles heartbeats and the requests around them."""

    def __init__(
        self,
        settings: LiveSettings,
        clients: Clients,
        groups: Groups,
        topics: Topics,
        filters: Filters,
    ) -> None:
        self._settings = settings
        self._clients = clients
        self._groups = groups
        self._topics = topics
        self._filters = filters
        self._unfinished_bytes = 0

    def rows(self) -> list[Row]:
        return [
            Row(RequestCode.HEART_BEAT, self.heartbeat),
            Row(RequestCode.UNREGISTER_CLIENT, self.unregister),
            Row(RequestCode.GET_CONSUMER_LIST_BY_GROUP, self.list_consumers),
            Row(RequestCode.CHECK_CLIENT_CONFIG, self.check_filter),
        ]

    def heartbeat(self, command: Command) -> Answer:
        """HEART_BEAT: register a client in all its groups."""
        last = self._clients.applied_heartbeat(command.client)
        if last is not None and last.is_repeated_by(command) and self._renew(last, command.now_ms):
            return Reply(ext=FULL_HEARTBEATS_ONLY)
        data = command.body_as(HeartbeatData, bytes_max=BODY_BYTES_MAX)
        check_heartbeat(data)
        member = GroupMember(
            command.client,
            data.client_id,
            command.peer,
            command.language,
            command.version,
            command.now_ms,
            command.user,
        )
        refusals: list[SystemBusy] = []
        applied = AppliedHeartbeat.of(command, member)

        def answer() -> Answer:
            if refusals:  # the other groups are registered
                raise refusals[-1]
            return Reply(ext=FULL_HEARTBEATS_ONLY)

        room = self._unfinished_bytes + len(command.body) <= UNFINISHED_BYTES_MAX
        return run_in_steps(
            self._register(data, applied, refusals),
            answer,
            step_items=GROUPS_PER_STEP if room else GROUPS_MAX + 1,
        )

    def _renew(self, last: AppliedHeartbeat, now_ms: int) -> bool:
        """Refresh the client in its groups; False if the heartbeat has to be applied again."""
        for group, _ in last.consumers:
            if (
                self._groups.get(group.name) is None
                or self._topics.get(RETRY_TOPIC_PREFIX + group.name) is None
            ):
                return False
        return self._clients.renew(last, now_ms)

    def _register(
        self, data: HeartbeatData, applied: AppliedHeartbeat, refusals: list[SystemBusy]
    ) -> Iterator[None]:
        """Register the client in one group after another, unless it leaves before."""
        member, clients = applied.member, self._clients
        with clients.registering(member) as heartbeat, self._unfinished(applied.body_length):
            for consumer in data.consumer_data_set:
                name = consumer.group_name
                if heartbeat.includes(name, consumes=True):
                    self._try_consumer(consumer, member, data.without_sub, refusals)
                    group = clients.consumer_group(name)
                    if group is not None:
                        applied.consumers.append((group, group.version))
                yield
            for producer in data.producer_data_set:
                name = producer.group_name
                if name and heartbeat.includes(name, consumes=False):
                    try:
                        clients.register_producer(name, member)
                    except SystemBusy as error:
                        refusals.append(error)
                    producers = clients.producer_group(name)
                    if producers is not None:
                        applied.producers.append(producers)
                yield
            if self._is_complete(data, applied):
                clients.keep_applied(applied)

    @staticmethod
    def _is_complete(data: HeartbeatData, applied: AppliedHeartbeat) -> bool:
        """Whether a heartbeat has a group for each that it names. A client that was refused is not
        the group's member, so such a heartbeat is not taken for a repeated one either."""
        named = sum(1 for producer in data.producer_data_set if producer.group_name)
        return (
            len(applied.consumers) == len(data.consumer_data_set)
            and len(applied.producers) == named
            and applied.names_groups_once()
        )

    @contextmanager
    def _unfinished(self, body_bytes: int) -> Iterator[None]:
        self._unfinished_bytes += body_bytes
        try:
            yield
        finally:
            self._unfinished_bytes -= body_bytes

    def _try_consumer(
        self,
        consumer: ConsumerData,
        member: GroupMember,
        without_sub: bool,
        refusals: list[SystemBusy],
    ) -> None:
        try:
            self._register_consumer(consumer, member, with_subscriptions=not without_sub)
        except SystemBusy as error:
            refusals.append(error)
        except Refused as error:
            # The client's other groups are registered; pulls of this one report the error.
            log.warning(
                "refused group %s in the heartbeat of client %s: %s",
                consumer.group_name,
                member.client_id,
                error.remark(),
            )

    def unregister(self, command: Command) -> Answer:
        """UNREGISTER_CLIENT."""
        command.text("clientID")
        self._clients.unregister(
            command.client, command.text_or("producerGroup"), command.text_or("consumerGroup")
        )
        return Reply()

    def list_consumers(self, command: Command) -> Answer:
        """GET_CONSUMER_LIST_BY_GROUP: the client ids of a group, for rebalance."""
        name = command.text("consumerGroup")
        group = self._clients.consumer_group(name)
        if group is None:
            raise Refused(
                f"no consumer for this group, {name}",
                hint="no consumer is connected to this broker; a heartbeat registers it",
            )
        return Reply(body=group.list_body())

    def check_filter(self, command: Command) -> Answer:
        """CHECK_CLIENT_CONFIG: check a consumer's filter."""
        subscription = command.body_as(CheckClientRequestBody).subscription_data
        kind = subscription.expression_type if subscription is not None else TAG
        if subscription is not None and kind not in ("", TAG):
            self._filters.check_kind(kind, self._settings.current.broker.property_filter)
            self._filters.get(subscription.sub_string or "")
        return Reply()

    def _register_consumer(
        self, data: ConsumerData, member: GroupMember, *, with_subscriptions: bool
    ) -> None:
        config = self._groups.find(data.group_name, member.seen_ms, member.client)
        # mqadmin finds the brokers of a group by the route of its retry topic.
        self._topics.ensure(
            RETRY_TOPIC_PREFIX + data.group_name,
            config.retry_queue_nums,
            PERM_READ_WRITE,
            member.seen_ms,
        )
        if self._clients.register_consumer(data, member, with_subscriptions=with_subscriptions):
            log.info(
                "client %s (%s) joined or changed group %s",
                member.client_id,
                member.address,
                config.group_name,
            )
