"""A NameServer and a broker in one event loop, on free ports, over a directory."""

import socket
from functools import partial
from pathlib import Path
from typing import Any

from penstock.client.received_message import ReceivedMessage, decode_records
from penstock.config import Settings
from penstock.config.settings import with_values
from penstock.errors import refusal
from penstock.server.broker_service import BrokerService
from penstock.server.nameserver_service import NameServerService
from penstock.store.get import FOUND
from penstock.testing.clock import BrokerClock
from penstock.testing.passage import Passage
from penstock.testing.patient import FleetingDisk, PatientBroker
from penstock.transport.peer import Peer
from penstock.wire.codes import PERM_READ_WRITE, RequestCode, ResponseCode
from penstock.wire.output import Output

LOOPBACK = "127.0.0.1"
EVER_MS = 10 * 365 * 86_400_000
ASK_MS = 10_000
PORT_TRIES = 5
READ_BYTES = 1 << 20

SETTINGS: dict[str, Any] = {
    "broker.host": LOOPBACK, "broker.probe_port": 0, "broker.vip_port": 0,
    "nameserver.host": LOOPBACK, "nameserver.port": 0,
    "tls.mode": "off",
    # Clients are alive as long as they are connected: they live by another clock.
    "broker.client_expire_ms": EVER_MS, "server.idle_ms": EVER_MS,
    "nameserver.broker_expire_ms": EVER_MS,
    # Nothing is lost because days have passed, or because the machine's disk is full.
    "store.retain_hours": EVER_MS // 3_600_000, "store.disk_clean_percent": 100,
    "store.disk_force_percent": 100, "store.disk_refuse_percent": 100,
    "store.segment_bytes": 8 << 20, "store.queue_file_entries": 2_000,
    "store.index_slots": 2_000, "store.index_entries": 8_000, "store.timer_log_bytes": 1 << 20,
}  # fmt: skip


class House:
    """The servers of a test; everything here is called in their loop."""

    def __init__(self, clock: BrokerClock, data: Path, settings: dict[str, Any]) -> None:
        self._clock = clock
        self._settings = with_values(Settings(), SETTINGS | settings)
        self._data = data
        self._names: NameServerService | None = None
        self._service: BrokerService | None = None
        self._admin: Peer | None = None
        self._passage: Passage | None = None
        self.nameserver = ""
        self.address = ""

    # --- life

    async def start(self) -> None:
        """Serve."""
        names = self._names = NameServerService(self._settings, self._clock)
        await names.start()
        assert names.server is not None
        self.nameserver = f"{LOOPBACK}:{names.server.port}"
        for left in reversed(range(PORT_TRIES)):
            try:
                await self._start_broker(_free_port())
                return
            except OSError:  # somebody else was faster
                if left == 0:
                    raise

    async def _start_broker(self, port: int) -> None:
        settings = with_values(
            self._settings,
            {"broker.port": port, "broker.nameservers": self.nameserver,
             "broker.data": str(self._data)},
        )  # fmt: skip
        service = BrokerService(
            settings, self._clock, disk=FleetingDisk(threads=settings.store.sync_flush),
            make_broker=partial(PatientBroker, clock=self._clock),
        )  # fmt: skip
        await service.start()
        self._service = service
        self.address = f"{LOOPBACK}:{port}"
        self._admin = Peer(self.address)
        self._passage = Passage(self._clock, service, self._admin)

    async def _stop_broker(self) -> None:
        admin, service = self._admin, self._service
        self._admin = self._service = self._passage = None
        if admin is not None:
            await admin.close()
        if service is not None:
            await service.stop()

    async def stop(self) -> None:
        """End."""
        self._clock.flow()
        try:
            await self._stop_broker()
            if self._names is not None:
                await self._names.stop()
        finally:
            self._clock.stand()
            self._clock.forget()

    async def restart(self) -> None:
        """Stop the broker in order, and start it with what it has stored."""
        port = int(self.address.rpartition(":")[2])
        self._clock.flow()
        await self._stop_broker()
        self._clock.stand()
        await self._start_broker(port)

    # --- what tests do with it

    async def move(self, ms: int) -> None:
        """Let time pass."""
        assert self._passage is not None, "the broker does not run"
        await self._passage.move(ms)

    async def create_topic(self, topic: str, queues: int) -> None:
        """Make a topic, or change it; the NameServer knows it then."""
        assert self._admin is not None, "the broker does not run"
        ext = {
            "topic": topic, "defaultTopic": "TBW102", "readQueueNums": str(queues),
            "writeQueueNums": str(queues), "perm": str(PERM_READ_WRITE), "topicSysFlag": "0",
            "topicFilterType": "SINGLE_TAG", "order": "false",
        }  # fmt: skip
        answer = await self._admin.call(RequestCode.UPDATE_AND_CREATE_TOPIC, ext, timeout_ms=ASK_MS)
        if answer.code != ResponseCode.SUCCESS:
            raise refusal(answer.code, answer.remark, self.address)

    def messages(self, topic: str) -> list[ReceivedMessage]:
        """All messages of a topic, queue by queue."""
        broker = self._broker()
        store = broker.parts.store
        found = []
        for queue in sorted(store.queues.of(topic.encode()), key=lambda each: each.queue_id):
            offset, end = queue.min_offset, queue.visible_max(store.confirmed)
            reader, output = store.fresh_reader(), Output(1024)
            while offset < end:
                status = reader.find(queue, offset, end - offset, READ_BYTES, store.confirmed, True)
                if status == FOUND:
                    assert reader.copy_to(output, True)
                    name = self._settings.broker.name
                    found += decode_records(output.take(), name)
                offset = max(reader.next_offset, offset + 1)
        return found

    def topics(self) -> list[str]:
        """The topics that are not the broker's own, those of retries and dead letters included."""
        topics = self._broker().parts.topics
        return sorted(name for name in topics.table.topics if not topics.is_system(name))

    def _broker(self) -> PatientBroker:
        assert self._service is not None, "the broker does not run"
        broker = self._service.broker
        assert isinstance(broker, PatientBroker)
        return broker


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port
