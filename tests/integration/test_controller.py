"""A controller over real sockets: elections, dead brokers, notifications, probe, signatures."""

from __future__ import annotations

import asyncio
import contextlib
import json
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from penstock.config import AccessConfig, ControllerConfig, Settings
from penstock.errors import BadSetting, TlsError
from penstock.server.controller.controller_service import ControllerService
from penstock.transport.peer import Peer
from penstock.wire.codes import RequestCode, ResponseCode
from penstock.wire.signing import signer
from tests.integration.loops import Run, run  # noqa: F401
from tests.integration.test_broker_service import free_port
from tests.integration.toy_broker import CALL_MS, ToyBroker, describe

NAME = "b"
WAIT_S = 20.0


@contextlib.asynccontextmanager
async def controller(data: Path, **values: Any) -> AsyncIterator[str]:
    """The address of a controller over files, or over etcd if `values` say so."""
    access = values.pop("access", AccessConfig())
    config = ControllerConfig(port=free_port(), data=str(data), **{"probe_port": 0, **values})
    service = ControllerService(Settings(controller=config, access=access))
    await service.start()
    try:
        yield f"127.0.0.1:{config.port}"
    finally:
        await service.stop()


async def until_master(address: str, broker: ToyBroker, epoch: int) -> dict[str, Any]:
    async with asyncio.timeout(WAIT_S):
        while True:
            found = await describe(address, NAME)
            if found.get("masterBrokerId") == broker.id and found["masterEpoch"] == epoch:
                return found
            await asyncio.sleep(0.01)


async def until_told(broker: ToyBroker, epoch: int) -> None:
    async with asyncio.timeout(WAIT_S):
        while not any(one["masterEpoch"] == str(epoch) for one in broker.told):
            await asyncio.sleep(0.01)


async def join(*brokers: ToyBroker) -> None:
    """The first broker becomes the master; all are in sync."""
    for broker in brokers:
        await broker.join()
    ids = [broker.id for broker in brokers]
    async with asyncio.timeout(WAIT_S):
        while (await brokers[0].alter_in_sync(ids, 1, 1)).code:  # until all are alive
            await asyncio.sleep(0.01)


def test_the_death_of_a_process_is_an_election_at_once(
    run: Run,  # noqa: F811
    tmp_path: Path,
) -> None:
    async def main() -> None:
        async with (
            controller(tmp_path) as address,
            # So long a timeout that only the closed port can be the reason.
            ToyBroker(NAME, [address], timeout_ms=600_000) as first,
            ToyBroker(NAME, [address], timeout_ms=600_000) as second,
        ):
            await join(first, second)
            await first.end()
            found = await until_master(address, second, 2)
            assert [one["reason"] for one in found["electionHistory"]] == [
                "first master",
                "replica 1 is dead: connection refused",
            ]
            assert found["electionHistory"][1]["masterBrokerId"] == second.id
            await until_told(second, 2)

    run(main())


def test_a_silent_replica_is_dead_after_its_timeout(
    run: Run,  # noqa: F811
    tmp_path: Path,
) -> None:
    async def main() -> None:
        async with (
            controller(tmp_path) as address,
            ToyBroker(NAME, [address], timeout_ms=1_000) as first,
            ToyBroker(NAME, [address]) as second,
        ):
            await join(first, second)
            await first.be_silent()
            found = await until_master(address, second, 2)
            assert "no heartbeat for 1000 ms" in found["electionHistory"][-1]["reason"]
            await until_told(second, 2)

    run(main())


def test_the_close_of_a_stale_connection_evicts_nobody(
    run: Run,  # noqa: F811
    tmp_path: Path,
) -> None:
    """apache/rocketmq#11045. Its port refuses, so that a wrong check would kill the master."""

    async def main() -> None:
        async with (
            controller(tmp_path) as address,
            ToyBroker(NAME, [address], timeout_ms=600_000) as first,
            ToyBroker(NAME, [address], timeout_ms=600_000) as second,
        ):
            stale = Peer(address)
            await join(first, second)
            await first.be_silent()
            await first.heartbeat(stale)
            await first.heartbeat()
            first._server.close()
            await stale.close()
            await second.call(RequestCode.CONTROLLER_GET_METADATA_INFO, {})
            await asyncio.sleep(0.3)  # nothing happens
            assert (await describe(address, NAME))["masterBrokerId"] == first.id

    run(main())


def test_an_operator_designates_a_master(run: Run, tmp_path: Path) -> None:  # noqa: F811
    async def main() -> None:
        async with (
            controller(tmp_path) as address,
            ToyBroker(NAME, [address]) as first,
            ToyBroker(NAME, [address]) as second,
        ):
            await join(first, second)
            assert (await second.elect(designated=True)).code == ResponseCode.SUCCESS
            found = await until_master(address, second, 2)
            assert found["electionHistory"][-1]["reason"] == "asked for by an operator"
            for broker in (first, second):
                await until_told(broker, 2)

    run(main())


def test_a_restarted_controller_knows_everything_and_replaces_nobody(
    run: Run,  # noqa: F811
    tmp_path: Path,
) -> None:
    async def main() -> None:
        async with contextlib.AsyncExitStack() as stack:
            async with controller(tmp_path) as address:
                first = await stack.enter_async_context(ToyBroker(NAME, [address]))
                second = await stack.enter_async_context(ToyBroker(NAME, [address]))
                await join(first, second)
                before = await describe(address, NAME)
            async with controller(tmp_path) as address, ToyBroker(NAME, [address]) as again:
                again.id, again.address = second.id, second.address
                again.beat()  # the slave is heard first
                assert (await again.elect()).code == ResponseCode.CONTROLLER_MASTER_STILL_EXIST
                after = await describe(address, NAME)
                assert after["masterBrokerId"] == first.id
                assert after["electionHistory"] == before["electionHistory"]

    run(main())


def test_names_and_addresses_are_checked(run: Run, tmp_path: Path) -> None:  # noqa: F811
    async def main() -> None:
        async with controller(tmp_path) as address, ToyBroker("x" * 256, [address]) as broker:
            for name in ("x" * 256, "", "a\nb"):
                broker.name = name
                code = (await broker.heartbeat()).code
                assert code == ResponseCode.INVALID_PARAMETER, name

    run(main())


# --- signatures


def test_only_signed_requests_change_anything(run: Run, tmp_path: Path) -> None:  # noqa: F811
    access = AccessConfig(internal_user="inner:secret")

    async def main() -> None:
        async with (
            controller(tmp_path, signed_changes=True, access=access) as address,
            ToyBroker(NAME, [address]) as stranger,
            ToyBroker(NAME, [address], sign=signer("inner", "secret")) as known,
        ):
            await known.join()
            stranger.id = known.id
            no = ResponseCode.NO_PERMISSION
            assert (await stranger.heartbeat()).code == no
            assert (await stranger.elect(designated=True)).code == no
            assert (await stranger.alter_in_sync([1], 1, 1)).code == no
            for code in (RequestCode.CLEAN_BROKER_DATA, RequestCode.UPDATE_CONTROLLER_CONFIG):
                assert (await stranger.call(code, {"brokerName": NAME})).code == no
            assert (await describe(address, NAME))["masterBrokerId"] == known.id

    run(main())


def test_signed_changes_need_a_user(run: Run, tmp_path: Path) -> None:  # noqa: F811
    async def main() -> None:
        with pytest.raises(BadSetting, match=r"controller\.signed_changes"):
            async with controller(tmp_path, signed_changes=True):
                pass

    run(main())


# --- the probe


def test_the_probe_shows_the_metrics_of_a_controller(
    run: Run,  # noqa: F811
    tmp_path: Path,
) -> None:
    port = free_port()

    def get(path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as page:
                return page.status, page.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    async def main() -> None:
        async with (
            controller(tmp_path, probe_port=port) as address,
            ToyBroker(NAME, [address]) as broker,
        ):
            await broker.join()
            assert (await asyncio.to_thread(get, "/readyz"))[0] == 200
            _, text = await asyncio.to_thread(get, "/metrics")
            assert "penstock_controller_elections_total{" in text
            values = dict(
                line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")
            )
            found = {key.partition("{")[0]: value for key, value in values.items()}
            assert found["penstock_controller_elections_total"] == "1"
            assert found["penstock_controller_living_replicas"] == "1"
            assert found["penstock_controller_broker_sets"] == "1"

    run(main())


def test_a_controller_without_etcd_is_not_ready(
    run: Run,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It starts, refuses requests, and says why."""
    from penstock.server.controller.etcd import etcd_backend, etcd_client

    monkeypatch.setattr(etcd_backend, "START_MS", 100)
    monkeypatch.setattr(etcd_client, "CALL_MS", 300)
    port = free_port()

    def get() -> tuple[int, str]:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5).close()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read())["reason"]
        raise AssertionError("it is ready")

    async def main() -> None:
        etcd = f"127.0.0.1:{free_port()}"
        async with controller(tmp_path, probe_port=port, etcd=etcd) as address:
            status, reason = await asyncio.to_thread(get)
            assert status == 503
            assert "etcd has not answered" in reason
            peer = Peer(address)
            fields = {"clusterName": "c", "brokerName": NAME}
            code = RequestCode.CONTROLLER_GET_NEXT_BROKER_ID
            answer = await peer.call(code, fields, timeout_ms=CALL_MS)
            await peer.close()
            assert answer.code == ResponseCode.SERVICE_NOT_AVAILABLE
            assert "controller.etcd" in (answer.remark or "")

    run(main())


def test_files_for_tls_are_checked_at_the_start(run: Run, tmp_path: Path) -> None:  # noqa: F811
    async def main() -> None:
        for setting in ("etcd_ca", "etcd_certificate"):
            with pytest.raises(TlsError, match=rf"controller\.{setting}"):
                async with controller(
                    tmp_path, etcd="https://127.0.0.1:1", **{setting: str(tmp_path / "missing")}
                ):
                    pass

    run(main())
