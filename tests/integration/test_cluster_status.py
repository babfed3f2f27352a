"""`penstock cluster status` of brokers under a controller: the last elections."""

import asyncio
import sys
from pathlib import Path

from tests import json_kit
from tests.integration.failover_kit import ControlledSet
from tests.integration.loops import Run, run  # noqa: F401
from tests.integration.test_replication import until


async def cluster_status(brokers: ControlledSet, *options: str) -> str:
    """What the command prints."""
    nameserver = f"127.0.0.1:{brokers.names.server.port}"
    program = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "penstock.cli.main", "cluster", "status", "-n", nameserver),
        *options,
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await program.communicate()
    assert program.returncode == 0
    return output.decode()


def test_the_last_elections_are_shown(tmp_path: Path, run: Run) -> None:  # noqa: F811
    brokers = ControlledSet(tmp_path)

    async def body() -> None:
        async with brokers.running(2):
            await brokers.await_in_sync(2)
            first = await brokers.await_master()
            await brokers.services[first].stop()
            await until(lambda: brokers.master() not in (None, first))
            _, _, table = (await cluster_status(brokers)).partition("Last elections:\n")
            head, *rows = (line.split() for line in table.splitlines())
            assert head == ["BROKER", "EPOCH", "MASTER", "TIME", "REASON"]
            assert [row[:2] for row in rows] == [["broker-a", "1"], ["broker-a", "2"]]
            assert rows[0][2] != rows[1][2]
            found = json_kit.check("cluster status", await cluster_status(brokers, "--json"))
            assert [one["epoch"] for one in found[0]["elections"]] == [1, 2]

            await brokers.controller.stop()
            shown = await cluster_status(brokers)
            assert "the elections of broker-a are unknown: " in shown
            assert "Last elections:" not in shown
            found = json_kit.check("cluster status", await cluster_status(brokers, "--json"))
            assert found[0]["elections"] is None

    run(body())
