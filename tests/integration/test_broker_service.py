"""A whole broker over real sockets, in this process."""

import asyncio
import logging
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.client import AsyncAdmin
from penstock.config import AccessConfig, BrokerConfig, Settings, StoreConfig
from penstock.errors import BadSetting
from penstock.server.services.broker_service import BrokerService
from penstock.server.services.nameserver_service import NameServerService
from penstock.store.disk import POOL_THREADS, STAT_BLOCK_BYTES, Disk
from penstock.transport.peer import Peer, Response
from penstock.wire.bodies.client_bodies import SubscriptionGroupConfig
from penstock.wire.codes import RequestCode
from penstock.wire.message import decode_messages
from tests.integration.loops import Run, run  # noqa: F401
from tests.store_kit import small_config

CALL_MS = 20_000


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@asynccontextmanager
async def broker(
    root: Path,
    store: StoreConfig | None = None,
    access: AccessConfig | None = None,
    *,
    disk: Disk | None = None,
    **config: Any,
) -> AsyncIterator[tuple[Peer, BrokerService]]:
    """A broker and a client that is connected to it."""
    settings = Settings(
        broker=BrokerConfig(
            **{"port": free_port(), "data": str(root), "probe_port": 0, "vip_port": 0, **config}
        ),
        store=store or small_config(sync_flush=False),
        access=access or AccessConfig(),
    )
    service = BrokerService(settings, disk=disk)
    await service.start()
    peer = Peer(f"127.0.0.1:{settings.broker.port}")
    try:
        yield peer, service
    finally:
        await peer.close()
        await service.stop()


async def send(peer: Peer, number: int, topic: str = "T", *, properties: str = "") -> Response:
    ext = {
        "a": "g", "b": topic, "c": "TBW102", "d": "4", "e": str(number % 4), "f": "0", "g": "1",
        "h": "0", "i": f"UNIQ_KEY\x01{number:032X}\x02{properties}",
    }  # fmt: skip
    return await peer.call(RequestCode.SEND_MESSAGE_V2, ext, b"%d" % number, timeout_ms=CALL_MS)


async def pull(peer: Peer, queue_id: int, offset: int, wait_ms: int = 0) -> Response:
    ext = {
        "consumerGroup": "G", "topic": "T", "queueId": str(queue_id), "queueOffset": str(offset),
        "maxMsgNums": "32", "sysFlag": "6" if wait_ms else "4", "commitOffset": "0",
        "suspendTimeoutMillis": str(wait_ms), "subscription": "*", "subVersion": "0",
    }  # fmt: skip
    return await peer.call(RequestCode.PULL_MESSAGE, ext, timeout_ms=CALL_MS)


def test_messages_are_sent_and_pulled(run: Run, tmp_path: Path) -> None:  # noqa: F811
    async def body() -> None:
        async with broker(tmp_path) as (peer, _):
            answers = await asyncio.gather(*(send(peer, n) for n in range(200)))
            assert {answer.code for answer in answers} == {0}
            found = []
            for queue_id in range(4):
                offset = 0
                while (answer := await pull(peer, queue_id, offset)).code == 0:
                    found += decode_messages(answer.body)
                    offset = int(answer.ext["nextBeginOffset"])
                assert answer.code == 19
            assert {int(message.body) for message in found} == set(range(200))

    run(body())


def test_a_suspended_pull_gets_the_message_at_once(run: Run, tmp_path: Path) -> None:  # noqa: F811
    async def body() -> None:
        async with broker(tmp_path) as (peer, _):
            await send(peer, 1)
            waiting = asyncio.ensure_future(pull(peer, 0, 0, CALL_MS))
            while not (await peer.call(RequestCode.GET_MAX_OFFSET, {"topic": "T", "queueId": "0"},
                                       timeout_ms=CALL_MS)).ext:  # fmt: skip
                pass
            assert not waiting.done()
            await send(peer, 4)
            assert [m.body for m in decode_messages((await waiting).body)] == [b"4"]
            assert (await pull(peer, 0, 1, 30)).code == 19, "its time is over"

    run(body())


def test_suspended_pulls_are_answered_when_the_broker_stops(
    run: Run,  # noqa: F811
    tmp_path: Path,
) -> None:
    async def body() -> None:
        async with broker(tmp_path) as (peer, service):
            await send(peer, 0)
            waiting = [asyncio.ensure_future(pull(peer, 0, 1, CALL_MS)) for _ in range(3)]
            while len(service.broker.context.long_polling) < len(waiting):
                await asyncio.sleep(0)
            await service.stop()
            answers = await asyncio.gather(*waiting)
            assert {(a.code, a.ext["nextBeginOffset"]) for a in answers} == {(19, "1")}

    run(body())


class SlowDisk(Disk):
    """A disk whose flushes wait while `go` is not set."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()
        self.go.set()

    def sync(self, fd: int) -> None:
        self.go.wait()
        super().sync(fd)

    def sync_directory(self, path: Path) -> None:
        self.go.wait()
        super().sync_directory(path)


def test_locks_are_answered_while_the_disk_does_not_flush(
    run: Run,  # noqa: F811
    tmp_path: Path,
) -> None:
    disk = SlowDisk()

    async def ask(peer: Peer, code: int, client_id: str, group: str) -> bytes:
        queue = {"topic": "T", "brokerName": "broker-a", "queueId": 0}
        request = {"consumerGroup": group, "clientId": client_id, "mqSet": [queue]}
        body = msgspec.json.encode(request)
        answer = await peer.call(code, {}, body, timeout_ms=CALL_MS)
        assert answer.code == 0
        return answer.body

    async def body() -> None:
        async with broker(tmp_path, disk=disk) as (peer, _):
            await send(peer, 1)
            disk.go.clear()
            try:
                for number in range(POOL_THREADS + 1):  # each has a new group, which is saved
                    owned = await ask(peer, RequestCode.LOCK_BATCH_MQ, "me", f"g{number}")
                    assert b'"queueId":0' in owned
                await ask(peer, RequestCode.UNLOCK_BATCH_MQ, "me", "g0")
                assert b'"queueId":0' in await ask(peer, RequestCode.LOCK_BATCH_MQ, "you", "g0")
            finally:
                disk.go.set()

    run(body())


@pytest.mark.parametrize("known", [False, True])
def test_a_new_group_gets_what_arrives_while_it_starts(
    run: Run,  # noqa: F811
    tmp_path: Path,
    known: bool,
) -> None:
    async def body() -> None:
        async with broker(tmp_path) as (peer, _):
            if known:
                await send(peer, 1)  # creates the topic; queue 0 has no messages yet
            place = {"consumerGroup": "G", "topic": "T", "queueId": "0"}
            stored = await peer.call(RequestCode.QUERY_CONSUMER_OFFSET, place, timeout_ms=CALL_MS)
            await send(peer, 4)
            if stored.code != 0:  # as Java's client does with CONSUME_FROM_LAST_OFFSET
                stored = await peer.call(RequestCode.GET_MAX_OFFSET, place, timeout_ms=CALL_MS)
            found = await pull(peer, 0, int(stored.ext["offset"]))
            assert [m.body for m in decode_messages(found.body)] == [b"4"]

    run(body())


def test_a_table_that_does_not_fit_in_a_frame_is_refused_and_read_in_pages(
    run: Run,  # noqa: F811
    tmp_path: Path,
) -> None:
    async def body() -> None:
        names = NameServerService(
            Settings(nameserver=msgspec.structs.replace(Settings().nameserver, port=free_port()))
        )
        await names.start()
        address = f"127.0.0.1:{names.settings.current.nameserver.port}"
        async with broker(tmp_path, nameservers=address) as (peer, service):
            groups = service.broker.context.groups.table
            for n in range(20_000):
                groups.put(SubscriptionGroupConfig(group_name=f"{n}-".ljust(250, "x")), 1)
            code = RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG
            whole = await peer.call(code, timeout_ms=CALL_MS)
            assert whole.code == 1
            assert (whole.remark or "").startswith("the response is too long: ")
            assert "the limit is 16777216; read tables in pages" in (whole.remark or "")
            assert (await send(peer, 1)).code == 0, "the connection goes on"
            async with AsyncAdmin(address) as admin:
                assert len(await admin.groups()) >= 20_000
        await names.stop()

    run(body())


def test_under_sync_flush_every_response_follows_its_flush(run: Run, tmp_path: Path) -> None:  # noqa: F811
    """Also beside requests in the thread pool, whose completion publishes the store, too."""

    async def body() -> None:
        config = small_config(sync_flush=True)
        async with broker(tmp_path, config, flush_timeout_ms=2_000) as (peer, _):
            other = Peer(peer.address)
            ended = False

            async def ask() -> None:
                while not ended:
                    await other.call(RequestCode.GET_ALL_TOPIC_CONFIG, timeout_ms=CALL_MS)

            asking = [asyncio.ensure_future(ask()) for _ in range(3)]
            codes = [(await send(peer, number)).code for number in range(150)]
            ended = True
            await asyncio.gather(*asking)
            await other.close()
            assert set(codes) == {0}

    run(body())


def test_delivered_delays_are_saved_before_the_regular_time(
    run: Run,  # noqa: F811
    tmp_path: Path,
) -> None:
    """Otherwise a broker that crashes again and again delivers them each time."""

    async def body() -> None:
        rarely = {"flush_pages_least": 1 << 20, "flush_thorough_ms": 3_600_000}
        config = msgspec.structs.replace(small_config(sync_flush=False), **rarely)
        async with broker(tmp_path, config, offset_persist_ms=3_600_000) as (peer, _):
            await send(peer, 0, properties="DELAY\x011\x02")
            assert (await pull(peer, 0, 0, CALL_MS)).code == 0
            file = tmp_path / "config" / "delayOffset.json"
            async with asyncio.timeout(CALL_MS / 1000):
                while not file.exists() or b"1:1" not in b"".join(file.read_bytes().split()):
                    await asyncio.sleep(0.05)

    run(body())


def test_messages_and_offsets_survive_a_restart(run: Run, tmp_path: Path) -> None:  # noqa: F811
    async def body() -> None:
        async with broker(tmp_path) as (peer, _):
            await send(peer, 0)
            ext = {"consumerGroup": "G", "topic": "T", "queueId": "0", "commitOffset": "1"}
            await pull(peer, 0, 0)
            assert (
                await peer.call(RequestCode.UPDATE_CONSUMER_OFFSET, ext, timeout_ms=CALL_MS)
            ).code == 0
        assert not (tmp_path / "abort").exists()
        async with broker(tmp_path) as (peer, _):
            assert len(decode_messages((await pull(peer, 0, 0)).body)) == 1
            ext = {"consumerGroup": "G", "topic": "T", "queueId": "0"}
            answer = await peer.call(RequestCode.QUERY_CONSUMER_OFFSET, ext, timeout_ms=CALL_MS)
            assert answer.ext["offset"] == "1"

    run(body())


def test_the_broker_registers_and_unregisters(run: Run, tmp_path: Path) -> None:  # noqa: F811
    async def body() -> None:
        names = NameServerService(
            msgspec.structs.replace(
                Settings(),
                nameserver=msgspec.structs.replace(Settings().nameserver, port=free_port()),
            )
        )
        await names.start()
        address = f"127.0.0.1:{names.settings.current.nameserver.port}"
        asker = Peer(address)
        async with broker(tmp_path, nameservers=address) as (peer, _):
            await send(peer, 1, "Fresh")

            async def route() -> int:
                call = await asker.call(105, {"topic": "Fresh"}, timeout_ms=CALL_MS)
                return call.code

            async with asyncio.timeout(20):
                while await route() != 0:
                    await asyncio.sleep(0.01)
        assert await route() == 17
        await asker.close()
        await names.stop()

    run(body())


def test_the_response_to_a_topic_creation_follows_the_registration_of_its_route(
    run: Run,  # noqa: F811
    tmp_path: Path,
) -> None:
    many = [{"topicName": f"old{n}", "readQueueNums": 4, "writeQueueNums": 4} for n in range(1_000)]

    async def body() -> None:
        names = NameServerService(
            Settings(nameserver=msgspec.structs.replace(Settings().nameserver, port=free_port()))
        )
        await names.start()
        address = f"127.0.0.1:{names.settings.current.nameserver.port}"
        asker = Peer(address)
        missing = []

        async def create(peer: Peer, creator: int) -> None:
            for number in range(10):
                topic = f"new-{creator}-{number}"
                fields = {"topic": topic, "readQueueNums": "4", "writeQueueNums": "4", "perm": "6"}
                assert (await peer.call(17, fields, timeout_ms=CALL_MS)).code == 0
                if (await asker.call(105, {"topic": topic}, timeout_ms=CALL_MS)).code != 0:
                    missing.append(topic)

        async with broker(tmp_path, nameservers=address) as (peer, _):
            table = msgspec.json.encode({"topicConfigList": many})
            assert (await peer.call(18, {}, table, timeout_ms=CALL_MS)).code == 0
            assert (await asker.call(105, {"topic": "old999"}, timeout_ms=CALL_MS)).code == 0
            await asyncio.gather(*(create(peer, creator) for creator in range(6)))
        await asker.close()
        await names.stop()
        assert missing == []

    run(body())


def test_an_address_that_can_not_be_resolved_is_reported(run: Run, tmp_path: Path) -> None:  # noqa: F811
    async def body() -> None:
        with pytest.raises(BadSetting, match="announce"):
            async with broker(tmp_path, announce="no such host"):
                pass

    run(body())


def test_an_advertised_address_of_another_host_is_logged(
    run: Run,  # noqa: F811
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def body() -> None:
        async with broker(tmp_path, announce="127.0.0.2", host="127.0.0.1"):
            assert "does not reach this broker" in caplog.text

    run(body())


def test_a_new_broker_takes_little_of_the_disk_and_reports_it(
    run: Run,  # noqa: F811
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def body() -> None:
        async with broker(tmp_path, StoreConfig()) as (peer, _):
            for number in range(10):
                assert (await send(peer, number)).code == 0

    with caplog.at_level(logging.INFO, "penstock.server.services.opened_store"):
        run(body())
    assert "the log holds 0.0 MiB; log and index take 8.0 MiB of the disk" in caplog.text
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert sum(path.stat().st_blocks for path in files) * STAT_BLOCK_BYTES < 32 << 20
