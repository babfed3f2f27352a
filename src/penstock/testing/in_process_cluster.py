"""A NameServer and a broker in one event loop, on free ports, with one data directory."""

import socket
from functools import partial
from pathlib import Path
from typing import Any

from penstock.client.received_message import ReceivedMessage, decode_records
from penstock.config import Settings
from penstock.config.settings import with_values
from penstock.errors import refusal
from penstock.server.services.broker_service import BrokerService
from penstock.server.services.nameserver_service import NameServerService
from penstock.store.get import FOUND
from penstock.testing.clock_driver import ClockDriver
from penstock.testing.virtual_clock import BrokerClock
from penstock.testing.virtual_time import UnsyncedDisk, VirtualTimeBroker
from penstock.transport.peer import Peer
from penstock.wire.codes import PERM_READ_WRITE, RequestCode, ResponseCode
from penstock.wire.output import Output

LOOPBACK = "127.0.0.1"
FOREVER_MS = 10 * 365 * 86_400_000
CALL_MS = 10_000
PORT_TRIES = 5
READ_BYTES = 1 << 20

SETTINGS: dict[str, Any] = {
    "broker.host": LOOPBACK, "broker.probe_port": 0, "broker.vip_port": 0,
    "nameserver.host": LOOPBACK, "nameserver.port": 0,
    "tls.mode": "off",
    # Clients use the real clock, so they never expire by the broker's clock.
    "broker.client_expire_ms": FOREVER_MS, "server.idle_ms": FOREVER_MS,
    "nameserver.broker_expire_ms": FOREVER_MS,
    # Retention deletes nothing, however far the clock advances and however full the disk is.
    "store.retain_hours": FOREVER_MS // 3_600_000, "store.disk_clean_percent": 100,
    "store.disk_force_percent": 100, "store.disk_refuse_percent": 100,
    "store.segment_bytes": 8 << 20, "store.queue_file_entries": 2_000,
    "store.index_slots": 2_000, "store.index_entries": 8_000, "store.timer_log_bytes": 1 << 20,
}  # fmt: skip


class InProcessCluster:
    """The servers of a test. All methods are called in the servers' event loop."""

    def __init__(self, clock: BrokerClock, data: Path, settings: dict[str, Any]) -> None:
        self._clock = clock
        self._settings = with_values(Settings(), SETTINGS | settings)
        self._data = data
        self._nameserver: NameServerService | None = None
        self._service: BrokerService | None = None
        self._admin: Peer | None = None
        self._driver: ClockDriver | None = None
        self.nameserver = ""
        self.address = ""

    # --- start and stop

    async def start(self) -> None:
        """Start the NameServer and the broker."""
        nameserver = self._nameserver = NameServerService(self._settings, self._clock)
        await nameserver.start()
        assert nameserver.server is not None
        self.nameserver = f"{LOOPBACK}:{nameserver.server.port}"
        for left in reversed(range(PORT_TRIES)):
            try:
                await self._start_broker(_free_port())
                return
            except OSError:  # another process has taken the port
                if left == 0:
                    raise

    async def _start_broker(self, port: int) -> None:
        settings = with_values(
            self._settings,
            {
                "broker.port": port,
                "broker.nameservers": self.nameserver,
                "broker.data": str(self._data),
            },
        )
        service = BrokerService(
            settings,
            self._clock,
            disk=UnsyncedDisk(threads=settings.store.sync_flush),
            make_broker=partial(VirtualTimeBroker, clock=self._clock),
        )
        await service.start()
        self._service = service
        self.address = f"{LOOPBACK}:{port}"
        self._admin = Peer(self.address)
        self._driver = ClockDriver(self._clock, service, self._admin)

    async def _stop_broker(self) -> None:
        admin, service = self._admin, self._service
        self._admin = self._service = self._driver = None
        if admin is not None:
            await admin.close()
        if service is not None:
            await service.stop()

    async def stop(self) -> None:
        """Stop the broker and the NameServer."""
        self._clock.run()
        try:
            await self._stop_broker()
            if self._nameserver is not None:
                await self._nameserver.stop()
        finally:
            self._clock.freeze()
            self._clock.clear()

    async def restart(self) -> None:
        """Shut the broker down and start it again on the same port with the same store."""
        port = int(self.address.rpartition(":")[2])
        self._clock.run()
        await self._stop_broker()
        self._clock.freeze()
        await self._start_broker(port)

    # --- for tests

    async def advance(self, ms: int) -> None:
        """Advance the broker's clock."""
        assert self._driver is not None, "the broker is not running"
        await self._driver.advance(ms)

    async def create_topic(self, topic: str, queues: int) -> None:
        """Create or change a topic, and register it with the NameServer."""
        assert self._admin is not None, "the broker is not running"
        ext = {
            "topic": topic,
            "defaultTopic": "TBW102",
            "readQueueNums": str(queues),
            "writeQueueNums": str(queues),
            "perm": str(PERM_READ_WRITE),
            "topicSysFlag": "0",
            "topicFilterType": "SINGLE_TAG",
            "order": "false",
        }
        answer = await self._admin.call(
            RequestCode.UPDATE_AND_CREATE_TOPIC, ext, timeout_ms=CALL_MS
        )
        if answer.code != ResponseCode.SUCCESS:
            raise refusal(answer.code, answer.remark, self.address)

    def messages(self, topic: str) -> list[ReceivedMessage]:
        """All messages of a topic, queue by queue."""
        broker = self._broker()
        store = broker.context.store
        found = []
        for queue in sorted(store.queues.of(topic.encode()), key=lambda each: each.queue_id):
            offset, end = queue.min_offset, queue.visible_max(store.confirm_offset)
            reader, output = store.new_reader(), Output(1024)
            while offset < end:
                status = reader.find(
                    queue, offset, end - offset, READ_BYTES, store.confirm_offset, True
                )
                if status == FOUND:
                    assert reader.copy_to(output, True)
                    name = self._settings.broker.name
                    found += decode_records(output.take(), name)
                offset = max(reader.next_offset, offset + 1)
        return found

    def topics(self) -> list[str]:
        """All topics except the broker's system topics; retry and dead letter topics included."""
        topics = self._broker().context.topics
        return sorted(name for name in topics.table.topics if not topics.is_system(name))

    def _broker(self) -> VirtualTimeBroker:
        assert self._service is not None, "the broker is not running"
        broker = self._service.broker
        assert isinstance(broker, VirtualTimeBroker)
        return broker


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port
