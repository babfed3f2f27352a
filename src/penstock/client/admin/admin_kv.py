"""NameServers: the KV configuration and their settings."""

from collections.abc import Mapping

from penstock.client.admin.admin_core import AdminCore
from penstock.wire import fastjson
from penstock.wire.bodies.client_bodies import KVTable
from penstock.wire.codes import RequestCode, ResponseCode
from penstock.wire.java_properties import format_properties, parse_properties

_FOUND = (ResponseCode.SUCCESS, ResponseCode.QUERY_NOT_FOUND)


class KeyValueAdmin(AdminCore):
    """The part of `AsyncAdmin` about NameServers. Changes are sent to all of them."""

    def nameservers(self) -> tuple[str, ...]:
        """The addresses of the NameServers."""
        return self.session.nameservers.addresses

    async def kv(self, namespace: str, key: str) -> str | None:
        """A value; None if there is none."""
        fields = {"namespace": namespace, "key": key}
        answer = await self.ask_nameserver(RequestCode.GET_KV_CONFIG, fields, good=_FOUND)
        return answer.ext.get("value")

    async def kv_table(self, namespace: str) -> dict[str, str]:
        """All values of a namespace by key."""
        answer = await self.ask_nameserver(
            RequestCode.GET_KVLIST_BY_NAMESPACE, {"namespace": namespace}, good=_FOUND
        )
        return fastjson.decode(answer.body, KVTable).table if answer.body else {}

    async def put_kv(self, namespace: str, key: str, value: str) -> None:
        """Set a value."""
        fields = {"namespace": namespace, "key": key, "value": value}
        await self.session.nameservers.call_all(RequestCode.PUT_KV_CONFIG, fields)

    async def delete_kv(self, namespace: str, key: str) -> None:
        """Delete a value."""
        fields = {"namespace": namespace, "key": key}
        await self.session.nameservers.call_all(RequestCode.DELETE_KV_CONFIG, fields)

    async def nameserver_settings(self) -> dict[str, dict[str, str]]:
        """The settings of each NameServer by its address."""
        found = {}
        for address in self.session.nameservers.addresses:
            answer = await self.ask(address, RequestCode.GET_NAMESRV_CONFIG)
            found[address] = parse_properties(answer.body)
        return found

    async def update_nameserver_settings(self, changes: Mapping[str, str]) -> None:
        """Change settings of all NameServers, by RocketMQ's names."""
        body = format_properties(changes)
        await self.session.nameservers.call_all(RequestCode.UPDATE_NAMESRV_CONFIG, {}, body)
