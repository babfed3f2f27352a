"""`Admin`, the synchronous administration client."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from penstock.client import diagnosis
from penstock.client.admin.async_admin import AsyncAdmin
from penstock.client.client_options import same_arguments_as
from penstock.client.consumer.rebalance import StartAt
from penstock.client.received_message import ReceivedMessage
from penstock.client.sync.sync_client import SyncClient, blocking, blocking_function, in_loop
from penstock.wire.codes import GROUP_TOOLS_CONSUMER


class Admin(SyncClient[AsyncAdmin]):
    """Topics, groups, offsets, messages, brokers and NameServers of a cluster."""

    @same_arguments_as(AsyncAdmin)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(partial(AsyncAdmin, *args, **kwargs))

    brokers = blocking(AsyncAdmin.brokers)
    masters = blocking(AsyncAdmin.masters)
    broker = blocking(AsyncAdmin.broker)
    brokers_without_master = blocking(AsyncAdmin.brokers_without_master)
    leaderless = brokers_without_master  # the name before 0.1.0 was released
    ask = blocking(AsyncAdmin.ask)
    ask_nameserver = blocking(AsyncAdmin.ask_nameserver)

    topic_names = blocking(AsyncAdmin.topic_names)
    topics = blocking(AsyncAdmin.topics)
    route = blocking(AsyncAdmin.route)
    create_topic = blocking(AsyncAdmin.create_topic)
    update_topic = blocking(AsyncAdmin.update_topic)
    topic_settings = blocking(AsyncAdmin.topic_settings)
    describe_topic = blocking(AsyncAdmin.describe_topic)
    groups_of_topic = blocking(AsyncAdmin.groups_of_topic)
    delete_topic = blocking(AsyncAdmin.delete_topic)

    groups = blocking(AsyncAdmin.groups)
    create_group = blocking(AsyncAdmin.create_group)
    update_group = blocking(AsyncAdmin.update_group)
    delete_group = blocking(AsyncAdmin.delete_group)
    topics_of_group = blocking(AsyncAdmin.topics_of_group)
    members = blocking(AsyncAdmin.members)
    producers = blocking(AsyncAdmin.producers)
    producer_groups = blocking(AsyncAdmin.producer_groups)
    running_info = blocking(AsyncAdmin.running_info)
    committed_offset = blocking(AsyncAdmin.committed_offset)
    progress = blocking(AsyncAdmin.progress)
    plan_reset = blocking(AsyncAdmin.plan_reset)
    plan_clone = blocking(AsyncAdmin.plan_clone)
    apply_reset = blocking(AsyncAdmin.apply_reset)
    clone_offsets = blocking(AsyncAdmin.clone_offsets)

    find_message = blocking(AsyncAdmin.find_message)
    message_by_unique_id = blocking(AsyncAdmin.message_by_unique_id)
    message_by_offset_id = blocking(AsyncAdmin.message_by_offset_id)
    messages_by_key = blocking(AsyncAdmin.messages_by_key)
    message_at = blocking(AsyncAdmin.message_at)
    browse = blocking(AsyncAdmin.browse)

    def follow(
        self,
        topic: str,
        *,
        start_at: StartAt = "last",
        tags: str = "*",
        sql: str | None = None,
        group: str = GROUP_TOOLS_CONSUMER,
    ) -> Iterator[ReceivedMessage]:
        """New messages of a topic, without end and without being a consumer of it."""
        client = self._started_client()
        return self._iterate(
            client.follow(topic, start_at=start_at, tags=tags, sql=sql, group=group)
        )

    track = blocking(AsyncAdmin.track)
    consume_directly = blocking(AsyncAdmin.consume_directly)
    dead_letters = blocking(AsyncAdmin.dead_letters)
    resend_message = blocking(AsyncAdmin.resend_message)
    resend_dead_letters = blocking(AsyncAdmin.resend_dead_letters)
    scheduled = blocking(AsyncAdmin.scheduled)
    recall = blocking(AsyncAdmin.recall)
    open_transactions = blocking(AsyncAdmin.open_transactions)

    find_messages = blocking_function(diagnosis.find_messages)
    explain_message = blocking_function(diagnosis.explain_message)
    explain_group = blocking_function(diagnosis.explain_group)
    trace_message = blocking_function(diagnosis.trace_message)
    select_messages = blocking_function(diagnosis.select_messages)
    select_dead_letters = blocking_function(diagnosis.select_dead_letters)
    plan_resend = blocking_function(diagnosis.plan_resend)
    resend = blocking_function(diagnosis.resend)

    cluster = blocking(AsyncAdmin.cluster)
    replicas = blocking(AsyncAdmin.replicas)
    elections = blocking(AsyncAdmin.elections)
    election_histories = blocking(AsyncAdmin.election_histories)
    plan_promotion = blocking(AsyncAdmin.plan_promotion)
    promote = blocking(AsyncAdmin.promote)
    broker_runtime_info = blocking(AsyncAdmin.broker_runtime_info)
    broker_figures = broker_runtime_info  # the name before 0.1.0 was released
    broker_settings = blocking(AsyncAdmin.broker_settings)
    update_broker_settings = blocking(AsyncAdmin.update_broker_settings)
    statistics = blocking(AsyncAdmin.statistics)
    stop_writes = blocking(AsyncAdmin.stop_writes)
    allow_writes = blocking(AsyncAdmin.allow_writes)

    nameservers = in_loop(AsyncAdmin.nameservers)
    kv = blocking(AsyncAdmin.kv)
    kv_table = blocking(AsyncAdmin.kv_table)
    put_kv = blocking(AsyncAdmin.put_kv)
    delete_kv = blocking(AsyncAdmin.delete_kv)
    nameserver_settings = blocking(AsyncAdmin.nameserver_settings)
    update_nameserver_settings = blocking(AsyncAdmin.update_nameserver_settings)
