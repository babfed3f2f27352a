"""Lets only one broker use a broker name and id.

A broker asks a NameServer which address has its name and id (GET_BROKER_MEMBER_GROUP) before each
registration. Penstock's NameServers refuse a second broker anyway. Apache's would replace the first
one, and NameServers before 5.0 do not know the request.

* A broker does not start while another one has its name and id. Of two masters with epochs, the
  one with the smaller epoch was replaced: it gives up, and the other one need not wait for that.
* Of two running brokers, each of which has registered with another NameServer, the one that was
  started later gives up: it unregisters, and registers again only when no NameServer has listed the
  other one for three registration periods. So a restarted NameServer gets the first broker back.
"""

from typing import NamedTuple

from penstock.clock import Clock
from penstock.errors import BodyError, BrokerNameTaken
from penstock.transport.peer import Peer, Response
from penstock.wire import fastjson
from penstock.wire.bodies.client_bodies import GetBrokerMemberGroupResponseBody
from penstock.wire.codes import EXT_BOOT_TIMESTAMP, MASTER_ID, RequestCode, ResponseCode
from penstock.wire.java_numbers import parse_long

ABSENT_PERIODS = 3


class OtherBroker(NamedTuple):
    """Another broker with the same name and id."""

    address: str
    booted_ms: int  # 0: not known
    nameserver: str


class BrokerName:
    """The use of one broker's name and id."""

    def __init__(self, address: str, clock: Clock) -> None:
        """`address` is announced by this broker, which is being started."""
        self._address = address
        self._clock = clock
        self.booted_ms = clock.now_ms()
        self._taken: BrokerNameTaken | None = None
        self._taken_until_ms = 0  # by the monotonic clock

    async def find_other(
        self, peer: Peer, header: dict[str, str], timeout_ms: int
    ) -> OtherBroker | None:
        """The other broker that this NameServer lists, if any; raises PeerError.

        `header` contains the fields that name this broker.
        """
        response = await _ask_for_members(peer, header, timeout_ms)
        address = _addresses(response).get(int(header["brokerId"]))
        if address is None or address == self._address:
            return None
        booted_ms = parse_long(response.ext.get(EXT_BOOT_TIMESTAMP, "")) or 0
        return OtherBroker(address, booted_ms, peer.address)

    async def is_listed_as_master(
        self, peer: Peer, header: dict[str, str], timeout_ms: int
    ) -> bool:
        """Whether this NameServer lists this broker's address as the master; raises PeerError."""
        response = await _ask_for_members(peer, header, timeout_ms)
        return _addresses(response).get(MASTER_ID) == self._address

    def taken_by(
        self, other: OtherBroker, header: dict[str, str], *, replaced: bool = False
    ) -> BrokerNameTaken:
        """The reason for this broker not to register; `replaced`: as the master, by the other."""
        if replaced:
            return BrokerNameTaken(
                f"{other.address} has replaced this broker as the master of {header['brokerName']}",
                hint="change broker.id to an id that is not in use and set replication.role to "
                "slave: then this broker follows the new master",
            )
        return BrokerNameTaken(
            f"the NameServer {other.nameserver} lists another broker {header['brokerName']} "
            f"(id {header['brokerId']}) at {other.address}; this one is {self._address}"
        )

    def give_up_for(
        self,
        other: OtherBroker,
        header: dict[str, str],
        period_ms: int,
        *,
        replaced: bool = False,
    ) -> bool:
        """Give up the name if the other broker has replaced this one, or was started before it.

        Returns whether it still used its name before.
        """
        mine, theirs = self.booted_ms, other.booted_ms
        earlier = (mine if theirs else 0, self._address) < (theirs, other.address)
        if earlier and not replaced:
            return False
        used = self._taken is None
        self._taken = self.taken_by(other, header, replaced=replaced)
        self._taken_until_ms = self._clock.monotonic_ms() + ABSENT_PERIODS * period_ms
        return used

    def check(self) -> None:
        """Raise BrokerNameTaken if this broker has given up its name."""
        if self._taken is not None and self._clock.monotonic_ms() < self._taken_until_ms:
            raise self._taken
        self._taken = None


async def _ask_for_members(peer: Peer, header: dict[str, str], timeout_ms: int) -> Response:
    return await peer.call(RequestCode.GET_BROKER_MEMBER_GROUP, header, timeout_ms=timeout_ms)


def _addresses(response: Response) -> dict[int, str]:
    """The addresses of a broker name, by id; empty if the NameServer does not know the request."""
    if response.code != ResponseCode.SUCCESS or not response.body:
        return {}
    try:
        body = fastjson.decode(response.body, GetBrokerMemberGroupResponseBody)
    except BodyError:
        return {}
    group = body.broker_member_group
    return {} if group is None else group.broker_addrs
