"""The tables of a slave become those of its master; a promoted slave continues where it was."""

from collections.abc import Iterable
from pathlib import Path

import pytest

from penstock.broker.auth.sealed_table import seal, unseal
from penstock.broker.auth.users import SUPER, AccessTable, User
from penstock.broker.replicas.replica_role import ReplicaRole
from penstock.broker.replicas.replica_state import ReplicaState
from penstock.broker.takeover.replicated_tables import ReplicatedTables
from penstock.broker.takeover.takeover import LATE_MS
from penstock.errors import BodyError
from penstock.rpc.answers import PersistSoon
from penstock.store.store import MessageStore
from penstock.wire.bodies.client_bodies import (
    DataVersion,
    SetMessageRequestModeRequestBody,
    SubscriptionGroupConfig,
    TopicConfig,
)
from penstock.wire.bodies.table_bodies import (
    ConsumerOffsetSerializeWrapper,
    DelayOffsetSerializeWrapper,
    MessageRequestModeSerializeWrapper,
    TimerCheckpoint,
)
from tests.unit.broker.broker_kit import NOW_MS, BrokerFixture, bodies, broker_fixture
from tests.unit.broker.replicas.test_replica_role import receive, settings, slave

VERSION = DataVersion(counter=7, timestamp=NOW_MS, state_version=3)


def run(steps: Iterable[None]) -> None:
    for _ in steps:
        pass


def tables_of(env: BrokerFixture) -> ReplicatedTables:
    assert env.broker.replicated is not None
    return env.broker.replicated


def noted(env: BrokerFixture) -> ReplicaState:
    """The note on the disk, after all files that are due are written."""
    for effect in env.broker.effects.take():
        if isinstance(effect, PersistSoon):
            env.context.persistence.save(effect.table)()
    state = ReplicaState()
    state.load(env.context.persistence.file(ReplicaState.FILE))
    return state


def offsets(**queues: int) -> ConsumerOffsetSerializeWrapper:
    return ConsumerOffsetSerializeWrapper(
        offset_table={key.replace("_", "@"): {0: offset} for key, offset in queues.items()},
        data_version=VERSION,
    )


# --- topics and groups ---------------------------------------------------------------------------


def topics(*names: str, queues: int = 4) -> dict[str, TopicConfig]:
    return {name: TopicConfig(topic_name=name, read_queue_nums=queues) for name in names}


def test_topics_become_those_of_the_master(tmp_path: Path) -> None:
    with slave(tmp_path) as env:
        tables = tables_of(env)
        run(tables.replace_topics(topics("A", "B"), VERSION, NOW_MS))
        run(tables.replace_topics(topics("B", queues=8), VERSION, NOW_MS))
        table = env.context.topics.table
        assert dict(table.topics) == topics("B", queues=8)
        assert table.version == VERSION
        assert table.queues == 16
        assert table.dirty
    with broker_fixture(tmp_path, settings(), role=ReplicaRole(slave=True)) as env:
        assert env.context.topics.table.version == VERSION
        assert env.context.topics.need("B").read_queue_nums == 8


def test_groups_become_those_of_the_master(tmp_path: Path) -> None:
    def groups(*names: str) -> dict[str, SubscriptionGroupConfig]:
        return {name: SubscriptionGroupConfig(group_name=name) for name in names}

    with slave(tmp_path) as env:
        tables, table = tables_of(env), env.context.groups.table
        run(tables.replace_groups(groups("A", "B"), {"A": {"T": 4}}, VERSION, NOW_MS))
        assert not env.context.groups.may_read("A", "T")
        run(tables.replace_groups(groups("A", "C"), {"C": {"U": 4}}, VERSION, NOW_MS))
        assert list(table.groups) == ["A", "C"]
        assert env.context.groups.may_read("A", "T")
        assert not env.context.groups.may_read("C", "U")
        assert table.version == VERSION


def test_request_modes_become_those_of_the_master(tmp_path: Path) -> None:
    mode = SetMessageRequestModeRequestBody(topic="T", consumer_group="G", mode="POP")
    with slave(tmp_path) as env:
        wrapper = MessageRequestModeSerializeWrapper(message_request_mode_map={"T": {"G": mode}})
        tables_of(env).replace_modes(wrapper)
    with broker_fixture(tmp_path, settings(slave=False)) as env:
        assert b'"POP"' in env.ask(402).body


# --- deleted topics ------------------------------------------------------------------------------


def queues_of(env: BrokerFixture, topic: str = "T") -> int:
    return len(env.store.queues.of(topic.encode()))


def test_queues_of_a_deleted_topic_are_removed_when_its_last_messages_have_arrived(
    tmp_path: Path,
) -> None:
    with slave(tmp_path, messages=3) as env:
        tables, end = tables_of(env), env.store.log.end
        env.context.topics.table.version = VERSION
        run(tables.replace_topics({}, VERSION.next(NOW_MS, state_version=3), NOW_MS))
        tables.topics_known(end, end + 1_000)  # the master's log is longer
        run(tables.remove_queues(end))
        assert queues_of(env) > 0
        receive(env, b"late" * 300)
        run(tables.remove_queues(env.store.log.end))
        assert queues_of(env) == 0
        assert env.store.deleted_below(b"T") == env.store.log.end


def test_queues_with_messages_of_a_new_topic_are_kept(tmp_path: Path) -> None:
    with slave(tmp_path, messages=3) as env:
        tables, end = tables_of(env), env.store.log.end
        env.context.topics.table.version = VERSION
        run(tables.replace_topics({}, VERSION.next(NOW_MS, state_version=3), NOW_MS))
        tables.topics_known(end, end)
        receive(env, b"of a new topic?")
        run(tables.remove_queues(end))
        assert queues_of(env) > 0
        run(tables.replace_topics(topics("T"), VERSION, NOW_MS))  # yes
        run(tables.remove_queues(env.store.log.end))
        assert queues_of(env) > 0


def test_queues_are_kept_if_the_master_has_lost_its_table(tmp_path: Path) -> None:
    with slave(tmp_path, messages=3) as env:
        tables, end = tables_of(env), env.store.log.end
        env.context.topics.table.version = VERSION
        run(tables.replace_topics({}, DataVersion(counter=1), NOW_MS))
        tables.topics_known(end, end)
        run(tables.remove_queues(end))
        assert queues_of(env) > 0


def test_a_promoted_slave_creates_only_topics_that_it_could_not_know(tmp_path: Path) -> None:
    with slave(tmp_path, messages=3) as env:
        run(tables_of(env).replace_topics({}, DataVersion(counter=1), NOW_MS))
        tables_of(env).topics_known(env.store.log.end, env.store.log.end)
        receive(env, b"new", topic="New")
    for _ in range(2):  # also at the start after the promotion
        with broker_fixture(tmp_path, settings(slave=False)) as env:
            assert env.context.topics.get("T") is None
            assert env.context.topics.get("New") is not None
            env.context.topics.table.remove("New", NOW_MS)


# --- offsets -------------------------------------------------------------------------------------


def test_offsets_become_those_of_the_master_also_if_smaller(tmp_path: Path) -> None:
    with slave(tmp_path) as env:
        tables, table = tables_of(env), env.context.offsets.table
        run(tables.replace_offsets(offsets(T_G=10, T_H=5), NOW_MS))
        run(tables.replace_offsets(offsets(T_G=3), NOW_MS))
        assert table.get("T", "G", 0) == 3
        assert table.get("T", "H", 0) is None
        assert table.version == VERSION


def test_equal_offsets_are_not_written_again(tmp_path: Path) -> None:
    with slave(tmp_path) as env:
        tables, table = tables_of(env), env.context.offsets.table
        run(tables.replace_offsets(offsets(T_G=10), NOW_MS))
        table.dirty = False
        run(tables.replace_offsets(offsets(T_G=10), NOW_MS))
        assert not table.dirty


def test_offsets_behind_the_end_are_limited_when_a_slave_becomes_the_master(
    tmp_path: Path,
) -> None:
    with slave(tmp_path, messages=3) as env:
        run(tables_of(env).replace_offsets(offsets(T_G=10, T_H=2, U_G=7), NOW_MS))
    with broker_fixture(tmp_path, settings(slave=False)) as env:
        get = env.context.offsets.get
        assert (get("G", "T", 0), get("H", "T", 0), get("G", "U", 0)) == (3, 2, 0)
        env.context.offsets.commit("G", "T", 0, 99, NOW_MS)
    with broker_fixture(tmp_path, settings(slave=False)) as env:  # done only once
        assert env.context.offsets.get("G", "T", 0) == 99


# --- time-driven services after a promotion ------------------------------------------------------


def deliver(root: Path, properties: dict[str, str], count: int, seconds: int) -> MessageStore:
    """A master that delivers messages by time."""
    with broker_fixture(root, settings(slave=False)) as env:
        for number in range(count):
            env.send(body=b"%d" % number, properties=properties)
        for _ in range(seconds * 10):
            env.tick(100)
        return env.store


@pytest.mark.parametrize("noted", [True, False])
def test_delay_levels_continue_behind_what_the_log_shows_as_delivered(
    tmp_path: Path, noted: bool
) -> None:
    deliver(tmp_path, {"DELAY": "1"}, count=3, seconds=3)
    with broker_fixture(tmp_path, settings(), role=ReplicaRole(slave=True)) as env:
        old = DelayOffsetSerializeWrapper(offset_table={1: 1}, data_version=VERSION)
        tables_of(env).replace_delay_offsets(old)
        tables_of(env).delivered_from(0 if noted else env.store.log.end)
    with broker_fixture(tmp_path, settings(slave=False)) as env:
        for _ in range(30):
            env.tick(100)
        again = [] if noted else [b"1", b"2"]
        assert bodies(env.pull()) == [b"0", b"1", b"2", *again]


@pytest.mark.parametrize("noted", [True, False])
def test_the_timer_leaves_out_what_was_delivered(tmp_path: Path, noted: bool) -> None:
    due = {"TIMER_DELIVER_MS": str(NOW_MS + 1_000)}
    deliver(tmp_path, due, count=3, seconds=3)
    with broker_fixture(tmp_path, settings(slave=False)) as env:
        env.send(body=b"later", properties={"TIMER_DELIVER_MS": str(NOW_MS + 60_000)})
    with broker_fixture(tmp_path, settings(), role=ReplicaRole(slave=True)) as env:
        # The checkpoint is from before the deliveries, or from after them.
        read_ms = NOW_MS + LATE_MS if noted else NOW_MS + 2 * LATE_MS
        tables_of(env).replace_timer_progress(
            TimerCheckpoint(last_read_time_ms=read_ms, last_timer_queue_offset=3)
        )
        tables_of(env).delivered_from(0 if noted else env.store.log.end)
    with broker_fixture(tmp_path, settings(slave=False)) as env:
        for _ in range(100):
            env.tick(1_000)
        assert bodies(env.pull()) == [b"0", b"1", b"2", b"later"]


@pytest.mark.parametrize("seconds", [0, 1], ids=["before the rebuild", "after it"])
def test_a_new_master_that_restarts_still_knows_what_was_delivered(
    tmp_path: Path, seconds: int
) -> None:
    deliver(tmp_path, {"TIMER_DELIVER_MS": str(NOW_MS + 1_000)}, count=3, seconds=3)
    with broker_fixture(tmp_path, settings(), role=ReplicaRole(slave=True)) as env:
        tables_of(env).replace_timer_progress(
            TimerCheckpoint(last_read_time_ms=NOW_MS + LATE_MS, last_timer_queue_offset=3)
        )
    with broker_fixture(tmp_path, settings(slave=False)) as env:
        for _ in range(seconds * 50):
            env.tick(20)
        assert noted(env).takes_over == (seconds == 0)
    with broker_fixture(tmp_path, settings(slave=False)) as env:
        for _ in range(100):
            env.tick(1_000)
        assert bodies(env.pull()) == [b"0", b"1", b"2"]
        assert not noted(env).takes_over


def test_a_timer_message_that_was_late_is_not_lost(tmp_path: Path) -> None:
    """It was due before the checkpoint of the old master, which had not delivered it yet."""
    with broker_fixture(tmp_path, settings(slave=False)) as env:
        env.send(body=b"late", properties={"TIMER_DELIVER_MS": str(NOW_MS + 1_000)})
    with broker_fixture(tmp_path, settings(), role=ReplicaRole(slave=True)) as env:
        tables_of(env).replace_timer_progress(
            TimerCheckpoint(last_read_time_ms=NOW_MS + 3_000, last_timer_queue_offset=1)
        )
    with broker_fixture(tmp_path, settings(slave=False)) as env:
        for _ in range(100):
            env.tick(100)
        assert bodies(env.pull()) == [b"late"]


# --- users ---------------------------------------------------------------------------------------


def access_table() -> AccessTable:
    table = AccessTable()
    table.put_user(User.of("alice", "secret", SUPER), NOW_MS)
    return table


def test_users_are_copied(tmp_path: Path) -> None:
    with slave(tmp_path) as env:
        table = env.context.access.table
        table.put_user(User.of("bob", "gone"), NOW_MS)
        sealed = seal(access_table().export(), "shared", "challenge")
        assert b"secret" not in sealed
        tables_of(env).replace_access(unseal(table, sealed, "shared", "challenge"), NOW_MS)
        assert list(table.users) == ["alice"]
    with broker_fixture(tmp_path, settings(), role=ReplicaRole(slave=True)) as env:
        assert env.context.access.table.users["alice"].password == "secret"
        assert env.context.access.table.version == access_table().version


@pytest.mark.parametrize(("secret", "challenge"), [("other", "challenge"), ("shared", "old")])
def test_a_table_for_another_secret_or_request_is_refused(secret: str, challenge: str) -> None:
    sealed = seal(access_table().export(), "shared", "challenge")
    with pytest.raises(BodyError, match="another secret"):
        unseal(AccessTable(), sealed, secret, challenge)
    with pytest.raises(BodyError):
        unseal(AccessTable(), b"short", "shared", "challenge")


def test_ordered_pops_are_saved_with_the_offsets(tmp_path: Path) -> None:
    with slave(tmp_path) as env:
        tables_of(env).replace_ordered_pops(b'{"table":{}}')
        run(tables_of(env).replace_offsets(offsets(T_G=1), NOW_MS))
        env.context.persistence.save(env.context.offsets.table)()
        path = tmp_path / "config" / "consumerOrderInfo.json"
        assert path.read_bytes() == b'{"table":{}}'
