"""The page Cluster while the master of three replicas is killed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .conftest import Open
from .servers import Program, kill_broker, start_cluster, start_console, taken_port

REPLICAS = 3
FAILOVER_MS = 60_000


@pytest.fixture
def replicas(tmp_path: Path) -> Iterator[tuple[Program, str, str]]:
    """Three replicas under a controller: their process, the NameServer, a console's address."""
    servers, nameserver = start_cluster(tmp_path / "servers", "--replicas", REPLICAS)
    console, url = start_console(nameserver, tmp_path / "console")
    yield servers, nameserver, url
    console.stop()
    servers.stop()


def last_election(nameserver: str) -> Any:
    """As the command line tells it."""
    command = [sys.executable, "-m", "penstock.cli.main", "cluster", "elections", "--json"]
    found = subprocess.run([*command, "-n", nameserver], capture_output=True, check=True)
    return json.loads(found.stdout)[-1]


def test_a_failover_is_shown_without_a_reload(
    open_page: Open, replicas: tuple[Program, str, str]
) -> None:
    servers, nameserver, url = replicas
    page = open_page("/cluster", at=url)
    page.page.set_default_timeout(FAILOVER_MS)
    page.find(f"tbody tr:has-text('in sync') >> nth={REPLICAS - 2}").wait_for()
    rows = page.rows(".panel:not(#elections)")
    [old] = [address for address, cells in rows.items() if "master" in cells[0]]
    others = sorted(rows.keys() - {old})
    elections = page.find("#elections tbody tr").count()
    page.find(f"tr[data-key='{others[0]}'] button").focus()

    kill_broker(servers, int(old.rpartition(":")[2]))
    with taken_port(int(old.rpartition(":")[2])):
        page.find(f"tr[data-key='{old}'] .badge:text-is('down')").wait_for()
        page.find("tr:has(.badge:text-is('master')) .badge:text-is('down')").wait_for(
            state="detached"
        )
        page.find("tr:has(.badge:text-is('master'))").wait_for()
        page.find(f"#elections tbody tr >> nth={elections}").wait_for()
        rows = page.rows(".panel:not(#elections)")
        [new] = [address for address, cells in rows.items() if "master" in cells[0]]
        assert new in others
        assert set(rows) == {old, *others}

        election = last_election(nameserver)
        newest = page.find("#elections tbody tr").first.inner_text()
        assert election["reason"]
        assert election["reason"] in newest
        assert f"{new} (id {election['master_id']})" in newest

        focused = "document.activeElement.closest('tr')?.dataset.key"
        assert page.page.evaluate(focused) == others[0]
        page.find(f"tr[data-key='{old}'] button").click()
        page.expect("not registered with the NameServers", "dialog")
        page.expect("when it answered last", "dialog")
        page.button("Close", "dialog").click()

    page.find(f"tr[data-key='{old}'] .badge:text-is('in sync')").wait_for()
    assert page.find(f"tr[data-key='{old}'] .badge:text-is('down')").count() == 0
