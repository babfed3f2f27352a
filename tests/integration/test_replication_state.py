"""What a master and its slave show of their replication, over real sockets in this process."""

from pathlib import Path
from typing import Any

import pytest

from penstock.transport.peer import Peer
from penstock.wire import fastjson
from penstock.wire.bodies.client_bodies import KVTable
from penstock.wire.bodies.cluster_bodies import EpochEntryCache, HARuntimeInfo
from penstock.wire.codes import RequestCode, ResponseCode
from tests.integration.loops import Run, run  # noqa: F401
from tests.integration.test_broker_service import send
from tests.integration.test_replication import PROTOCOLS, Pair, assert_equal, until


async def ask(peer: Peer, code: int, kind: type[Any]) -> Any:
    return fastjson.decode((await peer.call(code, {}, timeout_ms=5_000)).body, kind)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_both_replicas_show_their_state(
    tmp_path: Path,
    run: Run,  # noqa: F811
    protocol: str,
) -> None:
    pair = Pair(tmp_path, protocol=protocol)
    status = RequestCode.GET_BROKER_HA_STATUS

    async def body() -> None:
        async with pair.broker("master") as (client, master):
            for number in range(20):
                assert (await send(client, number)).code == 0
            alone = await ask(client, status, HARuntimeInfo)
            assert (alone.master, alone.ha_connection_info) == (True, [])
            async with pair.broker("slave") as (reader, slave):
                await assert_equal(master, slave)
                end = master.broker.context.store.log.end
                await until(
                    lambda: any(one.in_sync for one in master.broker.role.replication().slaves)
                )
                shown = await ask(client, status, HARuntimeInfo)
                assert (shown.in_sync_slave_nums, shown.master_commit_log_max_offset) == (1, end)
                (one,) = shown.ha_connection_info
                assert (one.slave_ack_offset, one.diff, one.in_sync) == (end, 0, True)
                assert one.transfer_from_where == end
                shown = (await ask(reader, status, HARuntimeInfo)).ha_client_runtime_info
                assert (shown.master_addr, shown.max_offset) == (
                    f"127.0.0.1:{pair.ha_port}",
                    end,
                )
                assert min(shown.last_read_timestamp, shown.last_write_timestamp) > 0
                info = (await ask(client, RequestCode.GET_BROKER_RUNTIME_INFO, KVTable)).table
                assert info["penstockRole"] == "async_master"
                if protocol == "epochs":
                    assert info["penstockInSyncSlaves"] == "1"
                    for peer in (client, reader):
                        code = RequestCode.GET_BROKER_EPOCH_CACHE
                        epochs = await ask(peer, code, EpochEntryCache)
                        assert [entry.epoch for entry in epochs.epoch_list] == [1]
                        assert epochs.max_offset == end
                else:
                    answer = await client.call(
                        RequestCode.GET_BROKER_EPOCH_CACHE, {}, timeout_ms=5_000
                    )
                    assert answer.code == ResponseCode.SYSTEM_ERROR

    run(body())


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_slave_that_receives_nothing_knows_how_far_it_is_behind(
    tmp_path: Path,
    run: Run,  # noqa: F811
    protocol: str,
) -> None:
    """The HA protocols tell only what they send: the slave asks for the end of the log."""
    pair = Pair(tmp_path, protocol=protocol)

    async def body() -> None:
        async with pair.broker("master", secret="right") as (client, master):
            for number in range(20):
                assert (await send(client, number)).code == 0
            end = master.broker.context.store.log.end
            async with pair.broker("slave", secret="wrong") as (_, slave):
                assert slave.replication.metadata is not None
                slave.replication.metadata.set_master(client.address)
                state = slave.broker.role.replication
                await until(lambda: (known := state().master) is not None and known.log_end == end)
                follower = slave.replication.slave
                assert follower is not None
                assert follower.behind == end

    run(body())


def test_a_slave_without_its_master_says_so(
    tmp_path: Path,
    run: Run,  # noqa: F811
) -> None:
    pair = Pair(tmp_path)

    async def body() -> None:
        async with pair.broker("slave") as (_, slave):
            state = slave.broker.role.replication
            await until(lambda: bool((master := state().master) and master.error))
            master = state().master
            assert master is not None
            assert (master.connected, master.log_end) == (False, None)

    run(body())
