"""Where a slave waits for its disk: never in the event loop."""

import threading
from pathlib import Path
from typing import Any

import pytest

from penstock.server.replication.replication import EPOCH_FILE
from tests.integration.loops import Run, run  # noqa: F401
from tests.integration.test_broker_service import send
from tests.integration.test_replication import PROTOCOLS, Pair, assert_equal, until


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("from_first", [True, False])
def test_an_empty_slave_waits_for_no_disk_in_the_event_loop(
    tmp_path: Path,
    run: Run,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    protocol: str,
    from_first: bool,
) -> None:
    """The master's log begins later, so the slave's first file is another one."""
    pair = Pair(tmp_path, protocol=protocol, from_first_segment=from_first)
    used: dict[tuple[str, str], str] = {}

    async def body() -> None:
        async with pair.broker("master") as (client, master):
            for number in range(100):
                assert (await send(client, number)).code == 0
            store = master.broker.context.store
            old = store.log.segments.drop_first()
            store.log.segments.unlink(old)
            async with pair.broker("slave", master="") as (_, slave):
                log, disk = slave.broker.context.store.log, slave.broker.context.store.disk
                for method in ("create", "replace", "unlink"):
                    original = getattr(disk, method)

                    def note(path: Path, *rest: Any, original: Any = original) -> Any:
                        if log.end == log.begin() or path.name == EPOCH_FILE:
                            used[path.parent.name, path.name] = threading.current_thread().name
                        return original(path, *rest)

                    monkeypatch.setattr(disk, method, note)
                slave.replication.set_master(client.address, f"127.0.0.1:{pair.ha_port}")
                await until(lambda: slave.broker.context.store.log.end == store.log.end)
                assert slave.broker.context.store.log.begin() > 0
                await assert_equal(master, slave)
                assert all(segment.path.exists() for segment in log.segments.items)
                monkeypatch.undo()

    run(body())
    assert [folder for folder, _ in used].count("commitlog") >= 2  # one created, one deleted
    assert any(name == EPOCH_FILE for _, name in used) == (protocol == "epochs")
    assert threading.main_thread().name not in used.values()
