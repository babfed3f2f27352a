"""Saved plans that restore offsets."""

from pathlib import Path

import pytest

from penstock.cli.group.undo_plans import (
    PLANS_MAX,
    find_undo,
    read_undos,
    remove_undo,
    save_undo,
    undo_directory,
)
from penstock.client.admin.async_admin import QueueMove, ResetPlan
from penstock.errors import BadSetting
from penstock.wire.bodies.client_bodies import MessageQueue

NOW_MS = 1_794_804_755_000
QUEUE = MessageQueue("orders", "broker-a", 3)


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CONFIG_DIR", str(tmp_path))


def plan(group: str = "billing", offset: int | None = 7) -> ResetPlan:
    moves = () if offset is None else (QueueMove(QUEUE, 9, offset),)
    return ResetPlan(group, "orders", moves)


def save(undo: ResetPlan, now_ms: int = NOW_MS, name: str = "") -> str | None:
    return save_undo(undo, ("a:1", "b:2"), "ns", now_ms, name)


def test_a_plan_is_found_by_name_or_as_the_newest() -> None:
    old = save(plan("billing"))
    new = save(plan("../etc/%x"), NOW_MS + 1)
    assert old is not None
    assert new is not None
    assert new.endswith("-___etc__x"), "a group can't choose the path"
    assert find_undo(None).name == new
    found = find_undo(old)
    assert (found.group, found.topic, found.namespace) == ("billing", "orders", "ns")
    assert found.nameservers == ["a:1", "b:2"]
    assert found.targets() == {QUEUE: 7}
    remove_undo(new)
    assert [one.name for one in read_undos()] == [old]
    with pytest.raises(BadSetting, match="there is no plan 'other'"):
        find_undo("other")


def test_a_plan_is_replaced_by_what_was_applied() -> None:
    name = save(plan(offset=7))
    assert name is not None
    assert save(plan(offset=8), NOW_MS, name) == name
    assert [one.targets() for one in read_undos()] == [{QUEUE: 8}]


def test_an_empty_plan_is_not_saved() -> None:
    assert save(plan(offset=None)) is None
    with pytest.raises(BadSetting, match="no plan to undo"):
        find_undo(None)


@pytest.mark.slow
def test_the_newest_plans_are_kept() -> None:
    names = [save(plan(), NOW_MS + number) for number in range(PLANS_MAX + 3)]
    assert [one.name for one in read_undos()] == names[:2:-1]


def test_a_damaged_plan_is_named() -> None:
    name = save(plan())
    path = undo_directory() / f"{name}.json"
    path.write_text('{"name": 1}')
    with pytest.raises(BadSetting, match="is not a valid undo plan"):
        find_undo(None)
