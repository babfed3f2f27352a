"""Retention at a master whose slave is catching up, and at a slave."""

from pathlib import Path

import pytest

from tests.integration.loops import Run, run  # noqa: F401
from tests.integration.test_broker_service import send
from tests.integration.test_replication import PROTOCOLS, Pair, until


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_slave_that_catches_up_loses_nothing_unnoticed(
    tmp_path: Path,
    run: Run,  # noqa: F811
    caplog: pytest.LogCaptureFixture,
    protocol: str,
) -> None:
    pair = Pair(tmp_path, protocol=protocol, frame_bytes_max=1024)

    async def body() -> None:
        async with pair.broker("master", rate_bytes_max=1) as (client, master):
            for number in range(100):
                assert (await send(client, number)).code == 0
            store, service = master.broker.context.store, master.replication.master
            assert service is not None
            assert service._needed_from() is None
            async with pair.broker("slave"):
                await until(lambda: any(one.session for one in service.connections))
                await until(lambda: service._needed_from() is not None)
                assert (service._needed_from() or 0) < store.log.segments.segment_bytes
                live = master.broker.settings
                live.change({"replication.keep_for_slaves": "false"})
                assert service._needed_from() is None
                store.expire(2)  # as if the disk were full
                await until(lambda: master.broker.role.replication().deleted_bytes > 0)

    run(body())
    name = "slave 1 " if protocol == "epochs" else "slave 127.0.0.1:"
    (warning,) = [r for r in caplog.records if "retention has deleted" in r.getMessage()][:1]
    assert warning.levelname == "WARNING"
    assert f"that {name}" in warning.getMessage()


def test_a_slave_keeps_what_its_master_keeps(
    tmp_path: Path,
    run: Run,  # noqa: F811
) -> None:
    pair = Pair(tmp_path)

    async def body() -> None:
        async with pair.broker("master") as (client, master):
            for number in range(100):
                assert (await send(client, number)).code == 0
            store = master.broker.context.store
            async with pair.broker("slave") as (_, slave):
                replicated, metadata = slave.broker.replicated, slave.replication.metadata
                assert replicated is not None
                assert metadata is not None
                assert replicated._kept_from() is None  # not known yet
                metadata.set_master(client.address)
                await until(lambda: replicated._kept_from() == 0)
                store.expire(2)
                metadata.state.rounds = 0
                metadata.set_master(client.address)
                await until(lambda: replicated._kept_from() == store.log.begin() > 0)

    run(body())
