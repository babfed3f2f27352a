"""A NameServer: the handlers of its requests.

A broker is removed when it unregisters, when the connection that it registered over is closed, or
when it has sent nothing for the time in its registration. Routes are in memory only
(`route_table`). The key-value configuration and changed settings are on disk before a change is
answered.
"""

from collections.abc import Iterator
from typing import Final

from penstock.config import LiveSettings
from penstock.errors import HeaderError, QueryNotFound, TopicNotExist
from penstock.nameserver.broker_registration import read_body, read_registration
from penstock.nameserver.kv_config import ORDER_TOPIC_CONFIG, KVConfig
from penstock.nameserver.route_table import RouteTable, encode_route, route_of_zone
from penstock.rpc.answers import (
    Answer,
    ClientId,
    CloseConnection,
    EffectQueue,
    InThread,
    PersistentTable,
    Reply,
)
from penstock.rpc.changed_settings import ChangedSettings
from penstock.rpc.command import Command
from penstock.rpc.persistence import Persistence
from penstock.rpc.router import Router, Row
from penstock.wire import fastjson
from penstock.wire.bodies.client_bodies import (
    BrokerMemberGroup,
    DataVersion,
    GetBrokerMemberGroupResponseBody,
    TopicList,
    TopicRouteData,
)
from penstock.wire.codes import (
    EXT_BOOT_TIMESTAMP,
    EXT_ZONE_MODE,
    EXT_ZONE_NAME,
    RETRY_TOPIC_PREFIX,
    TOPIC_UNIT,
    TOPIC_UNIT_SUB,
    V4_9_4,
    RequestCode,
)
from penstock.wire.java_properties import format_properties, parse_properties

SUCCESS = Reply()

# Settings of Apache's NameServer that have a fixed value here.
FIXED_SETTINGS: Final = {
    "clusterTest": "false",
    "enableAllTopicList": "true",
    "enableControllerInNamesrv": "false",
    "enableTopicList": "true",
    "needWaitForService": "false",
    "notifyMinBrokerIdChanged": "false",
    "returnOrderTopicConfigToBroker": "true",
}


class NameServer:
    """One NameServer."""

    def __init__(
        self, settings: LiveSettings, now_ms: int, persistence: Persistence | None = None
    ) -> None:
        """Without `persistence` everything is in memory only."""
        self.effects = EffectQueue()
        self._settings = settings
        self._routes = RouteTable()
        self._kv = KVConfig()
        self._changed_settings = ChangedSettings()
        self._persistence = persistence
        if persistence is not None:
            for table in (self._kv, self._changed_settings):
                table.load(persistence.file(table.FILE))
            self._changed_settings.apply(settings)
        self._scanned_ms = now_ms
        self.router = Router([self._broker_rows(), self._route_rows(), self._admin_rows()])

    def handle(self, command: Command) -> Answer:
        """Handle a request."""
        return self.router.handle(command)

    def connected(self, client: ClientId, peer: str, now_ms: int) -> None:
        """Nothing to do: a broker registers by a request."""

    def disconnected(self, client: ClientId, now_ms: int) -> None:
        """Remove the brokers that registered over the connection."""
        self._routes.remove_brokers_of(client)

    def due(self) -> int:
        """When the next scan for expired brokers is due."""
        return self._scanned_ms + self._settings.current.nameserver.scan_ms

    def tick(self, now_ms: int) -> None:
        """Remove expired brokers, if a scan is due."""
        if now_ms < self.due():
            return
        self._scanned_ms = now_ms
        for broker in self._routes.expire(now_ms):
            self.effects.put(CloseConnection(broker.client, f"broker {broker.name} has expired"))

    def clock_stepped(self, step_ms: int) -> None:
        """The clock was set: brokers expire as if it had not been."""
        self._scanned_ms += step_ms
        self._routes.clock_stepped(step_ms)

    # --- brokers ---------------------------------------------------------------------------------

    def _broker_rows(self) -> Iterator[Row]:
        yield Row(RequestCode.REGISTER_BROKER, self._register)
        yield Row(RequestCode.UNREGISTER_BROKER, self._unregister)
        yield Row(RequestCode.BROKER_HEARTBEAT, self._heartbeat)
        yield Row(RequestCode.QUERY_DATA_VERSION, self._query_version)
        yield Row(RequestCode.REGISTER_TOPIC_IN_NAMESRV, self._register_topic)
        yield Row(RequestCode.GET_BROKER_MEMBER_GROUP, self._member_group)

    def _register(self, command: Command) -> Answer:
        registration = read_registration(command, self._settings.current.nameserver)
        if not self._routes.renew(registration, command.now_ms):
            body = read_body(registration, command.body)
            self._routes.register(registration, body, command.now_ms)
        ext = {}
        master = self._routes.master_of(registration)
        if master is not None:
            ext = {"masterAddr": master.address, "haServerAddr": master.ha_address}
        return Reply(ext=ext, body=self._kv.body(ORDER_TOPIC_CONFIG) or b"")

    def _unregister(self, command: Command) -> Answer:
        self._routes.unregister(
            command.text("clusterName"), command.text("brokerAddr"), command.text("brokerName")
        )
        return SUCCESS

    def _heartbeat(self, command: Command) -> Answer:
        self._mark_seen(command)
        return SUCCESS

    def _query_version(self, command: Command) -> Answer:
        broker = self._routes.brokers.get(self._mark_seen(command))
        if broker is None:
            return Reply(ext={"changed": "true"})
        changed = broker.version != command.body_as(DataVersion)
        return Reply(ext={"changed": str(changed).lower()}, body=fastjson.encode(broker.version))

    def _mark_seen(self, command: Command) -> tuple[str, str]:
        key = command.text("clusterName"), command.text("brokerAddr")
        self._routes.mark_seen(*key, command.now_ms)
        return key

    def _register_topic(self, command: Command) -> Answer:
        queues = command.body_as(TopicRouteData).queue_datas
        self._routes.add_topic(command.text("topic"), queues, command.client)
        return SUCCESS

    def _member_group(self, command: Command) -> Answer:
        name = command.text("brokerName")
        group = self._routes.broker_sets.get(name)
        ext = {}
        if "brokerId" in command.ext:  # asked by a broker that is about to register
            booted_ms = self._routes.booted_ms(name, command.i64("brokerId"))
            ext = {EXT_BOOT_TIMESTAMP: str(booted_ms)} if booted_ms else {}
        members = BrokerMemberGroup(
            cluster=command.text("clusterName"),
            broker_name=name,
            broker_addrs=group.broker_addrs if group is not None else {},
        )
        body = GetBrokerMemberGroupResponseBody(broker_member_group=members)
        return Reply(ext=ext, body=fastjson.encode(body))

    # --- routes and lists ------------------------------------------------------------------------

    def _route_rows(self) -> Iterator[Row]:
        yield Row(RequestCode.GET_ROUTEINFO_BY_TOPIC, self._route)
        yield Row(RequestCode.GET_BROKER_CLUSTER_INFO, self._cluster_info)
        yield Row(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER, self._all_topics)
        yield Row(RequestCode.GET_TOPICS_BY_CLUSTER, self._cluster_topics)
        yield Row(RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS, self._system_topics)
        yield Row(RequestCode.GET_UNIT_TOPIC_LIST, self._unit_topics)
        yield Row(RequestCode.GET_HAS_UNIT_SUB_TOPIC_LIST, self._unit_sub_topics)
        yield Row(RequestCode.GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST, self._only_unit_sub_topics)

    def _route(self, command: Command) -> Answer:
        topic = command.text("topic")
        config = self._settings.current.nameserver
        order = self._kv.get(ORDER_TOPIC_CONFIG, topic) if config.order_messages else None
        strict = command.version >= V4_9_4 or command.truth("acceptStandardJsonOnly")
        zone = command.ext.get(EXT_ZONE_NAME, "").strip()
        if zone and command.truth(EXT_ZONE_MODE):
            route = self._routes.route(topic, order=order, acting_master=config.acting_master)
            body = encode_route(route_of_zone(route, zone), strict=strict) if route else None
        else:
            body = self._routes.route_body(
                topic, strict=strict, order=order, acting_master=config.acting_master
            )
        if body is None:
            # Tools find a group by its retry topic, which its first consumer creates.
            group = topic.startswith(RETRY_TOPIC_PREFIX)
            raise TopicNotExist(
                f"No topic route info in name server for the topic: {topic}",
                hint="no consumer of this group has connected yet" if group else None,
            )
        return Reply(body=body)

    def _cluster_info(self, command: Command) -> Answer:
        return _body(self._routes.cluster_info())

    def _all_topics(self, command: Command) -> Answer:
        return _body(TopicList(topic_list=list(self._routes.topics)))

    def _cluster_topics(self, command: Command) -> Answer:
        return _body(TopicList(topic_list=self._routes.topics_of(command.text("cluster"))))

    def _system_topics(self, command: Command) -> Answer:
        """The topics named after clusters and brokers; a broker has the others."""
        names = dict.fromkeys(self._routes.clusters)
        for brokers in self._routes.clusters.values():
            names |= brokers
        group = next(iter(self._routes.broker_sets.values()), None)
        address = group.broker_addrs[min(group.broker_addrs)] if group is not None else None
        return _body(TopicList(topic_list=list(names), broker_addr=address))

    def _unit_topics(self, command: Command) -> Answer:
        return self._flagged_topics(TOPIC_UNIT, TOPIC_UNIT)

    def _unit_sub_topics(self, command: Command) -> Answer:
        return self._flagged_topics(TOPIC_UNIT_SUB, TOPIC_UNIT_SUB)

    def _only_unit_sub_topics(self, command: Command) -> Answer:
        return self._flagged_topics(TOPIC_UNIT | TOPIC_UNIT_SUB, TOPIC_UNIT_SUB)

    def _flagged_topics(self, mask: int, flags: int) -> Answer:
        return _body(TopicList(topic_list=self._routes.topics_by_flag(mask, flags)))

    # --- administration --------------------------------------------------------------------------

    def _admin_rows(self) -> Iterator[Row]:
        yield Row(RequestCode.WIPE_WRITE_PERM_OF_BROKER, self._wipe_write)
        yield Row(RequestCode.ADD_WRITE_PERM_OF_BROKER, self._add_write)
        yield Row(RequestCode.DELETE_TOPIC_IN_NAMESRV, self._delete_topic)
        yield Row(RequestCode.PUT_KV_CONFIG, self._put_kv)
        yield Row(RequestCode.GET_KV_CONFIG, self._get_kv)
        yield Row(RequestCode.DELETE_KV_CONFIG, self._delete_kv)
        yield Row(RequestCode.GET_KVLIST_BY_NAMESPACE, self._list_kv)
        yield Row(RequestCode.UPDATE_NAMESRV_CONFIG, self._update_config)
        yield Row(RequestCode.GET_NAMESRV_CONFIG, self._get_config)

    def _wipe_write(self, command: Command) -> Answer:
        count = self._routes.wipe_write(command.text("brokerName"))
        return Reply(ext={"wipeTopicCount": str(count)})

    def _add_write(self, command: Command) -> Answer:
        count = self._routes.add_write(command.text("brokerName"))
        return Reply(ext={"addTopicCount": str(count)})

    def _delete_topic(self, command: Command) -> Answer:
        self._routes.delete_topic(command.text("topic"), command.text_or("clusterName") or None)
        return SUCCESS

    def _put_kv(self, command: Command) -> Answer:
        value = command.ext.get("value")
        if value is None:
            raise HeaderError("the header field value is missing")
        self._kv.put(command.text("namespace"), command.text("key"), value)
        return self._persisted(self._kv)

    def _get_kv(self, command: Command) -> Answer:
        namespace, key = command.text("namespace"), command.text("key")
        value = self._kv.get(namespace, key)
        if value is None:
            raise QueryNotFound(f"No config item, Namespace: {namespace} Key: {key}", hint="")
        return Reply(ext={"value": value})

    def _delete_kv(self, command: Command) -> Answer:
        self._kv.remove(command.text("namespace"), command.text("key"))
        return self._persisted(self._kv)

    def _persisted(self, table: PersistentTable) -> Answer:
        """Success, after the table is written."""
        if self._persistence is None or not table.dirty:
            return SUCCESS
        return InThread(self._persistence.save(table), lambda _: SUCCESS)

    def _list_kv(self, command: Command) -> Answer:
        namespace = command.text("namespace")
        body = self._kv.body(namespace)
        if body is None:
            raise QueryNotFound(f"No config item, Namespace: {namespace}", hint="")
        return Reply(body=body)

    def _update_config(self, command: Command) -> Answer:
        if self._settings.change(parse_properties(command.body)):
            self._changed_settings.set(self._settings.changed, command.now_ms)
        return self._persisted(self._changed_settings)

    def _get_config(self, command: Command) -> Answer:
        return Reply(body=format_properties(self._settings.apache_values() | FIXED_SETTINGS))


def _body(value: object) -> Reply:
    return Reply(body=fastjson.encode(value))
