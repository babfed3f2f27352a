"""`penstock group` against a real `penstock up`."""

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock import Consumer
from tests import json_kit
from tests.compat.penstock import Up
from tests.integration.cli_kit import PATIENCE_S, Penstock, consume, send


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    with Up(tmp_path_factory.mktemp("up"), brokers=2) as servers:
        yield servers


@pytest.fixture
def run(up: Up, tmp_path: Path) -> Penstock:
    return Penstock(up.address, tmp_path / "config")


def test_create_change_list_and_delete_a_group(run: Penstock) -> None:
    made = run("group", "create", "life", "--retries-max", 3, "--orderly").stdout
    assert made.splitlines() == [
        f"group life is on {name}: 3 retries, orderly, enabled" for name in ("broker-a", "broker-b")
    ]
    flags = ("--no-orderly", "--disable", "-b", "broker-b", "--json", "--yes")
    changed = json_kit.check("group create", run("group", "create", "life", *flags).stdout)
    assert changed["brokers"]["broker-b"]["retries_max"] == 3
    assert changed["brokers"]["broker-b"]["orderly"] is False
    listed = run("group", "list").stdout
    assert re.search(r"^life +yes/no +yes/no +3 +broker-a, broker-b$", listed, re.MULTILINE)
    assert "TOOLS_CONSUMER" not in listed
    rows = json_kit.check("group list", run("group", "list", "--all", "--lag", "--json").stdout)
    mine = next(row for row in rows if row["group"] == "life")
    assert (mine["members"], mine["lag"], mine["lag_ms"]) == (0, 0, 0)
    assert any(row["is_system"] for row in rows)
    assert "lag" not in json.loads(run("group", "list", "--json").stdout)[0]
    refused = run("group", "delete", "life", code=2)
    assert "--yes" in refused.stderr
    assert "group life on broker-a, broker-b\n" in refused.stderr
    assert (
        run("group", "delete", "life", "--yes").stdout
        == "deleted group life on broker-a, broker-b\n"
    )
    error = run("group", "describe", "life", code=1).stderr
    assert error.startswith("penstock: no broker has the group 'life'")


def offsets(run: Penstock, group: str, topic: str) -> dict[tuple[str, int], int]:
    shown = json_kit.check(
        "group describe", run("group", "describe", group, "--topic", topic, "--json").stdout
    )
    return {
        (at["broker"], at["queue"]): at["committed"]
        for at in shown["queues"]
        if at["topic"] == topic
    }


def test_progress_members_reset_and_undo(up: Up, run: Penstock) -> None:
    run("topic", "create", "moved", "--queues", 2)
    send(up.address, "moved", 20)
    consume(up.address, "moved", "movers", 20)
    before = offsets(run, "movers", "moved")
    assert sum(before.values()) == 20
    send(up.address, "moved", 4)
    shown = run("group", "describe", "movers").stdout
    assert shown.startswith("group movers: lag 4 messages, behind ")
    assert "no connected members" in shown
    assert re.search(r"^moved +broker-a +0 +\d+ +\d+ +1 +\d", shown, re.MULTILINE)

    to_first = ("group", "reset", "movers", "-t", "moved", "--to", "first")
    planned = run(*to_first, "--dry-run").stdout
    assert "0 messages will be skipped, 20 will be consumed again" in planned
    plan = json_kit.check("group reset", run(*to_first, "--dry-run", "--json").stdout)
    assert (plan["applied"], plan["repeated"], plan["undo"]) == (False, 20, None)
    assert offsets(run, "movers", "moved") == before

    refused = run(*to_first, code=2)
    assert "--yes" in refused.stderr
    assert offsets(run, "movers", "moved") == before
    done = run(*to_first, stdin="y\n").stdout
    undo = re.search(r"^to undo: penstock group undo (\S+)$", done, re.MULTILINE)
    assert undo is not None
    assert set(offsets(run, "movers", "moved").values()) == {0}

    result = json_kit.check(
        "group reset",
        run("group", "reset", "movers", "-t", "moved", "--to", "+1", "--yes", "--json").stdout,
    )
    assert [move["after"] for move in result["moves"]] == [1, 1, 1, 1]
    listed = json_kit.check("group undo", run("group", "undo", "--list", "--json").stdout)
    assert [plan["name"] for plan in listed] == [result["undo"], undo[1]]
    assert undo[1] in run("group", "undo", "--list").stdout

    run("group", "undo", "--dry-run")
    run("group", "undo", "--yes")  # the newest
    assert set(offsets(run, "movers", "moved").values()) == {0}
    report = json_kit.check("group undo", run("group", "undo", undo[1], "-y", "--json").stdout)
    assert report["applied"] is True
    assert offsets(run, "movers", "moved") == before
    assert "there is no plan to undo" in run("group", "undo", code=1).stderr


def test_offsets_of_single_queues_and_clones(up: Up, run: Penstock) -> None:
    run("topic", "create", "cloned", "--queues", 1)
    send(up.address, "cloned", 6)
    consume(up.address, "cloned", "origin", 6)
    run("group", "create", "copy")
    planned = run("group", "clone", "origin", "copy", "-t", "cloned", "--dry-run")
    assert "0 messages will be skipped" not in planned.stdout
    assert planned.stdout.splitlines()[-1].startswith(
        "2 queues have no offset yet: how many messages will be skipped or consumed again there is"
    )
    to_first = ("group", "reset", "copy", "-t", "cloned", "--to", "first", "--dry-run", "--json")
    assert json_kit.check("group reset", run(*to_first).stdout)["unknown_queues"] == 2
    run("group", "clone", "origin", "copy", "-t", "cloned", "--yes")
    assert offsets(run, "copy", "cloned") == {("broker-a", 0): 3, ("broker-b", 0): 3}
    listed = run("group", "undo", "--list", "--json").stdout
    assert json.loads(listed) == [], "queues without an offset can't be restored"
    changed = run("group", "reset", "copy", "--topic", "cloned", "--offset", "broker-b/0=2", "-y")
    assert "changed the offsets of 1 queue of" in changed.stdout
    assert offsets(run, "copy", "cloned") == {("broker-a", 0): 3, ("broker-b", 0): 2}
    error = run("group", "reset", "copy", "-t", "cloned", "--offset", "broker-b/0=9", code=1).stderr
    assert "has the offsets 0 to 3, not 9" in error
    other = run("group", "undo", "-n", "127.0.0.1:1", code=2).stderr
    assert f"add -n '{up.address}'" in other


def test_members_of_a_running_group(up: Up, run: Penstock) -> None:
    run("topic", "create", "joined", "--queues", 1)
    run("group", "create", "joiners")
    assert run("group", "members", "joiners").stdout == "no connected members\n"
    with Consumer(up.address, group="joiners", start_at="first") as consumer:

        @consumer.on("joined", tags="a || b")
        def take(message: object) -> None: ...

        consumer.start()
        shown = json_kit.check("group members", run("group", "members", "joiners", "--json").stdout)
        assert [one["brokers"] for one in shown["members"]] == [["broker-a", "broker-b"]]
        assert {"topic": "joined", "expression": "a || b", "kind": "TAG"} in shown["subscriptions"]
        text = run("group", "members", "joiners").stdout
        assert "subscribes to joined: a || b (TAG)" in text
        assert shown["members"][0]["client_id"] in text
        refused = run("group", "delete", "joiners", stdin="n\n", code=130).stderr
        assert "1 client is connected" in refused


# --- shell completion


def complete(run: Penstock, *words: str, **more: str) -> list[str]:
    """What bash gets for the last word."""
    line = {"COMP_WORDS": " ".join(("penstock", *words)), "COMP_CWORD": str(len(words))}
    answer = run(_PENSTOCK_COMPLETE="bash_complete", **line, **more).stdout
    return [text.partition(",")[2] for text in answer.splitlines() if text]


def names(run: Penstock, *words: str, **more: str) -> list[str]:
    """Like `complete`; asks again if a busy cluster did not answer in time."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := complete(run, *words, **more)):
        assert time.monotonic() < deadline
    return found


def test_names_are_completed_from_the_cluster(up: Up, run: Penstock) -> None:
    run("topic", "create", "finished-one", "--queues", 1)
    run("group", "create", "finishers")
    assert names(run, "topic", "describe", "finis") == ["finished-one"]
    assert names(run, "group", "reset", "finis") == ["finishers"]
    assert names(run, "group", "reset", "finishers", "--topic", "finis") == ["finished-one"]
    assert complete(run, "topic", "delete", "TBW") == [], "system topics are not offered"
    run("context", "add", "here", "-n", up.address)
    assert names(run, "context", "use", "h") == ["here"]
    named = ("tail", "--context", "here", "finis")
    assert names(run, *named, NAMESRV_ADDR="") == ["finished-one"]
    assert names(run, "group") == ["group"]


def test_completion_without_a_cluster_is_silent(run: Penstock) -> None:
    assert complete(run, "send", "x", NAMESRV_ADDR="127.0.0.1:1") == []
    assert complete(run, "send", "--context", "missing", "x", NAMESRV_ADDR="127.0.0.1:1") == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_a_shell(run: Penstock, shell: str) -> None:
    assert f"_PENSTOCK_COMPLETE={shell}_complete" in run("completion", shell).stdout
