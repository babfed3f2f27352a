"""A broker over real sockets, attacked with raw requests."""

import time
from pathlib import Path

import pytest

from penstock import AsyncProducer, Message
from penstock.client.client_options import ClientKeywords
from penstock.config import AccessConfig, NameServerConfig, Settings
from penstock.errors import PenstockError
from penstock.server.services.nameserver_service import NameServerService
from penstock.transport.peer import Peer, Response
from penstock.wire.codes import RequestCode, ResponseCode
from penstock.wire.message import encode_properties
from penstock.wire.signing import signer
from tests.integration.loops import Run, run  # noqa: F401
from tests.integration.test_broker_service import CALL_MS, broker, free_port, pull, send

NO = ResponseCode.NO_PERMISSION


async def send_raw(peer: Peer, topic: str, **properties: str) -> Response:
    ext = {
        "a": "g", "b": topic, "c": "TBW102", "d": "4", "e": "0", "f": "0", "g": "1", "h": "0",
        "i": encode_properties(properties).decode(),
    }  # fmt: skip
    return await peer.call(RequestCode.SEND_MESSAGE_V2, ext, b"forged", timeout_ms=CALL_MS)


def test_raw_sends_to_internal_topics_write_nowhere(run: Run, tmp_path: Path) -> None:  # noqa: F811
    async def main() -> None:
        async with broker(tmp_path) as (peer, _):
            await send(peer, 0)  # creates T
            now = str(int(time.time() * 1000))
            forged = {"REAL_TOPIC": "T", "REAL_QID": "1", "UNIQ_KEY": "K", "DELAY": "1"}
            timer = {"TIMER_OUT_MS": now, "TIMER_DELIVER_MS": now}
            for topic in (
                "rmq_sys_wheel_timer",
                "SCHEDULE_TOPIC_XXXX",
                "RMQ_SYS_TRANS_OP_HALF_TOPIC",
                "rmq_sys_REVIVE_LOG_DefaultCluster",
            ):
                assert (await send_raw(peer, topic, **forged)).code == NO
                assert (await send_raw(peer, topic, **timer)).code == NO
            # A delayed message of this client is delivered after anything that was sent before it.
            assert (await send_raw(peer, "T", UNIQ_KEY="L", DELAY="1")).code == 0
            delivered = await pull(peer, 0, 1, wait_ms=10_000)
            assert delivered.code == ResponseCode.SUCCESS
            assert (await pull(peer, 1, 0)).code == ResponseCode.PULL_NOT_FOUND

    run(main())


def test_a_nameserver_with_signed_changes_knows_only_brokers_that_sign(
    run: Run,  # noqa: F811
    tmp_path: Path,
) -> None:
    access = AccessConfig(internal_user="inner:secret")
    config = NameServerConfig(port=free_port(), signed_changes=True)

    async def route_code(peer: Peer, topic: str) -> int:
        ext = {"topic": topic}
        code = RequestCode.GET_ROUTEINFO_BY_TOPIC
        return (await peer.call(code, ext, timeout_ms=CALL_MS)).code

    async def main() -> None:
        names = NameServerService(Settings(nameserver=config, access=access))
        await names.start()
        address = f"127.0.0.1:{config.port}"
        stranger, known = Peer(address), Peer(address, sign=signer("inner", "secret"))
        async with broker(tmp_path, nameservers=address, access=access) as (peer, _):
            await send(peer, 1, "Fresh")
            assert await route_code(stranger, "Fresh") == 0
            drop = {"topic": "Fresh", "clusterName": "DefaultCluster"}
            code = RequestCode.DELETE_TOPIC_IN_NAMESRV
            assert (await stranger.call(code, drop, timeout_ms=CALL_MS)).code == NO
            assert await route_code(stranger, "Fresh") == 0
            assert (await known.call(code, drop, timeout_ms=CALL_MS)).code == 0
            assert await route_code(stranger, "Fresh") == ResponseCode.TOPIC_NOT_EXIST
        await stranger.close()
        await known.close()
        await names.stop()

    run(main())


def test_penstock_clients_sign_strictly(run: Run, tmp_path: Path) -> None:  # noqa: F811
    access = AccessConfig(
        authentication=True,
        initial_user="root:root-secret",
        internal_user="inner:secret",
        strict_signing=True,
    )
    config = NameServerConfig(port=free_port(), signed_changes=True)
    address = f"127.0.0.1:{config.port}"
    keys: ClientKeywords = {"access_key": "root", "secret_key": "root-secret"}

    async def main() -> None:
        names = NameServerService(Settings(nameserver=config, access=access))
        await names.start()
        async with broker(tmp_path, nameservers=address, access=access):
            async with AsyncProducer(address, strict_signing=True, **keys) as producer:
                assert (await producer.send(Message("T", b"x"))).queue_offset == 0
                assert len(await producer.send_batch([Message("T", b"x")] * 3)) == 3
            async with AsyncProducer(address, **keys) as producer:
                with pytest.raises(PenstockError, match="only strict signatures"):
                    await producer.send(Message("T", b"x"))
        await names.stop()

    run(main())
