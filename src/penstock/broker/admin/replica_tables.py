"""Tables that only Penstock's slaves copy: GET_REPLICA_TABLE.

| `table` | Body |
|---|---|
| `orderedPops` | `consumerOrderInfo.json` |
| `access` | users and access lists, encrypted (`auth.sealed_table`); empty if `dataVersion` is the current version |
"""  # noqa: E501

from penstock.broker.auth.sealed_table import seal
from penstock.broker.context import BrokerContext
from penstock.broker.pop.ordered_pop import OrderedPops
from penstock.errors import InvalidParameter, NoPermission
from penstock.rpc.answers import Answer, InThread, Reply
from penstock.rpc.command import Command
from penstock.rpc.router import Row
from penstock.wire import fastjson
from penstock.wire.codes import RequestCode

ORDERED_POPS = "orderedPops"
ACCESS = "access"


class ReplicaTables:
    """Serves the tables to slaves."""

    def __init__(self, context: BrokerContext, order: OrderedPops) -> None:
        self._context = context
        self._order = order

    def rows(self) -> list[Row]:
        return [Row(RequestCode.GET_REPLICA_TABLE, self.get)]

    def get(self, command: Command) -> Answer:
        """GET_REPLICA_TABLE."""
        self._check_slave(command)
        name = command.text("table")
        if name == ORDERED_POPS:
            return Reply(body=self._order.body())
        if name == ACCESS:
            return self._access(command)
        raise InvalidParameter(f"there is no table {name!r} for slaves")

    def _check_slave(self, command: Command) -> None:
        """With access control, only the user of the brokers themselves gets the tables."""
        access = self._context.access
        internal = access.internal()
        if access.enabled() and (internal is None or command.user != internal.access_key):
            raise NoPermission(
                "only a slave of this broker may read this table",
                hint="set access.internal_user to the same value on all replicas of the broker",
            )

    def _access(self, command: Command) -> Answer:
        table, challenge = self._context.access.table, command.text("challenge")
        secret = self._context.settings.current.replication.secret
        if not secret:
            raise NoPermission(
                "users are sent to slaves only with a shared secret",
                hint="set replication.secret to the same value on all replicas of the broker",
            )
        version = fastjson.encode(table.version).decode()
        if command.text_or("dataVersion") == version:
            return Reply()
        content = table.export()
        return InThread(lambda: seal(content, secret, challenge), lambda data: Reply(body=data))
