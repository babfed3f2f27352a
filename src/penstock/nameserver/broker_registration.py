"""REGISTER_BROKER: the broker that registers, and the topics in its body.

A broker repeats its registration every 30 s, almost always with the same bytes. A
`BrokerRegistration` contains a digest of the body, so a repeated registration is recognised without
decoding it. SHA-256 of the 1.7 MB of 10,000 topics takes 1 ms, decoding them 10 ms.
"""

import hashlib
import re
from dataclasses import dataclass

from penstock.config import NameServerConfig
from penstock.errors import Refused
from penstock.rpc.answers import ClientId
from penstock.rpc.command import LOOSE_BODY_BYTES_MAX, Command
from penstock.wire import fastjson
from penstock.wire.bodies.registration_bodies import RegisterBrokerBody, body_crc32, decode_register
from penstock.wire.codes import EXT_BOOT_TIMESTAMP, EXT_ZONE_NAME, MASTER_ID

INFLATED_BYTES_MAX = 16 * 1024 * 1024
"""Longest compressed body after decompression: as long as a frame, about 300,000 topics."""

# Java writes this one table of static topics with unquoted numbers as keys. With quotes the whole
# body is strict JSON, which is decoded 50 times faster.
_UNQUOTED_TABLE = re.compile(rb'"currIdMap":\{[-0-9:,]*\}')
_UNQUOTED_KEY = re.compile(rb"(-?[0-9]+):")


@dataclass(frozen=True, slots=True)
class BrokerRegistration:
    """The registration of one broker process."""

    cluster: str
    name: str
    id: int
    address: str
    ha_address: str
    zone: str | None
    acting_master: bool | None  # None: a broker of 4.x, which can't act for its master
    expire_ms: int  # it is removed after this time without a request
    complete: bool  # topics that are missing in it are removed
    booted_ms: int  # 0 if the broker does not tell
    client: ClientId
    compressed: bool
    version: int
    body_crc: int
    body_digest: bytes

    @property
    def key(self) -> tuple[str, str]:
        """Cluster and address, which identify the process."""
        return self.cluster, self.address

    @property
    def is_master(self) -> bool:
        return self.id == MASTER_ID


def read_registration(command: Command, config: NameServerConfig) -> BrokerRegistration:
    """The registration; its body is not decoded."""
    expire_ms = command.i64_or("heartbeatTimeoutMillis", 0)
    return BrokerRegistration(
        cluster=command.text("clusterName"),
        name=command.text("brokerName"),
        id=command.i64("brokerId"),
        address=command.text("brokerAddr"),
        ha_address=command.text_or("haServerAddr"),
        zone=command.ext.get(EXT_ZONE_NAME),
        acting_master=(
            command.truth("enableActingMaster") if "enableActingMaster" in command.ext else None
        ),
        expire_ms=expire_ms if expire_ms > 0 else config.broker_expire_ms,
        complete=config.delete_absent_topics,
        booted_ms=command.i64_or(EXT_BOOT_TIMESTAMP, 0),
        client=command.client,
        compressed=command.truth("compressed"),
        version=command.version,
        body_crc=command.i32_or("bodyCrc32", 0),
        body_digest=hashlib.sha256(command.body).digest(),
    )


def read_body(registration: BrokerRegistration, body: bytes) -> RegisterBrokerBody:
    """Decode the body after checking its checksum; without a body there are no topics."""
    if registration.body_crc and registration.body_crc != body_crc32(body):
        raise Refused(
            f"crc32 not match: the body of {len(body)} bytes has {body_crc32(body)}, "
            f"bodyCrc32 is {registration.body_crc}",
            hint="the broker registers again; if the error persists, check the network",
        )
    if not body:
        return RegisterBrokerBody()
    if registration.compressed:
        return decode_register(
            body,
            compressed=True,
            version=registration.version,
            inflated_bytes_max=INFLATED_BYTES_MAX,
        )
    if _UNQUOTED_TABLE.search(body):
        body = _UNQUOTED_TABLE.sub(lambda table: _UNQUOTED_KEY.sub(rb'"\1":', table[0]), body)
    return fastjson.decode(body, RegisterBrokerBody, loose_bytes_max=LOOSE_BODY_BYTES_MAX)
