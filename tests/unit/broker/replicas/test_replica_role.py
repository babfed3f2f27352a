"""A broker in the role of a slave: what it serves, what it refuses, and that it writes nothing."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock.broker.metrics.broker_metrics import broker_metrics
from penstock.broker.metrics.group_lags import GroupLags
from penstock.broker.replicas.replica_role import MASTER_ONLY, PULLS, ReplicaRole
from penstock.broker.replicas.replica_state import ReplicaState
from penstock.config import BrokerConfig, ReplicationConfig, Settings
from penstock.errors import MasterNotConfirmed, NotMaster, SystemBusy, WriteStopped, refusal
from penstock.rpc.answers import Answer, Reply, Suspend
from penstock.store.put import PUT_OK
from penstock.wire.bodies.client_bodies import TopicConfig
from penstock.wire.codes import RequestCode, ResponseCode
from tests.store_kit import Message, small_config
from tests.unit.broker.broker_kit import NOW_MS, BrokerFixture, bodies, broker_fixture

MASTER = "10.0.0.1:10911"
HOUR_MS = 3_600_000


def settings(*, read: bool = True, slave: bool = True) -> Settings:
    return Settings(
        broker=BrokerConfig(id=1 if slave else 0),
        replication=ReplicationConfig(
            role="slave" if slave else "async_master", read_from_slaves=read
        ),
        store=small_config(sync_flush=False),
    )


@contextmanager
def slave(
    root: Path, *, read: bool = True, messages: int = 0, online: bool = False
) -> Iterator[BrokerFixture]:
    """A slave whose store holds messages that it received as a master."""
    with broker_fixture(root, settings(slave=False)) as env:
        env.broker.context.topics.put(TopicConfig(topic_name="T"), NOW_MS)
        for number in range(messages):
            assert env.send(body=b"%d" % number).code == 0
        for _ in range(2):
            env.tick(1_000)
    role = ReplicaRole(slave=True, master_address=MASTER)
    role.master_online = online
    with broker_fixture(root, settings(read=read), role=role) as env:
        yield env


def reply(answer: Answer) -> Reply:
    assert isinstance(answer, Reply), answer
    return answer


def suggested(answer: Answer) -> int:
    return int((reply(answer).ext or {})["suggestWhichBrokerId"])


# --- refused requests ----------------------------------------------------------------------------


@pytest.mark.parametrize("code", sorted(MASTER_ONLY), ids=lambda code: code.name)
def test_requests_of_the_master_are_refused_with_its_address(
    tmp_path: Path, code: RequestCode
) -> None:
    with slave(tmp_path) as env:
        end = env.store.log.end
        answer = env.ask(code)
        assert answer.code == ResponseCode.SYSTEM_BUSY
        assert MASTER in (answer.remark or "")
        assert env.store.log.end == end


def test_a_master_refuses_none_of_them(tmp_path: Path) -> None:
    with broker_fixture(tmp_path) as env:
        assert env.broker.router.rows.keys() >= MASTER_ONLY
        served = set(env.broker.router.rows)
    with slave(tmp_path) as env:
        assert set(env.broker.router.rows) == served


def test_a_send_creates_no_topic(tmp_path: Path) -> None:
    with slave(tmp_path) as env:
        assert env.send("New").code == ResponseCode.SYSTEM_BUSY
        assert env.context.topics.get("New") is None


def test_the_present_master_is_named(tmp_path: Path) -> None:
    with slave(tmp_path) as env:
        env.broker.role.master_address = "10.0.0.2:10911"
        assert "10.0.0.2:10911" in (env.send().remark or "")
        env.tick(1_000)
        assert "10.0.0.2:10911" in str(env.store.refusal)
        env.broker.role.master_address = ""
        assert "does not know its master" in (env.send().remark or "")


def test_clients_read_the_code_as_busy() -> None:
    assert isinstance(refusal(NotMaster.code, "why"), SystemBusy)


# --- the store and the services ------------------------------------------------------------------


def test_the_store_refuses_messages_for_good(tmp_path: Path) -> None:
    with slave(tmp_path) as env:
        for _ in range(3):
            env.tick(1_000)
            assert isinstance(env.store.refusal, NotMaster)
        assert env.broker.not_ready() is None
        env.store.writer.refusal = WriteStopped("the disk failed")
        env.tick(1_000)
        assert env.broker.not_ready() is not None


def test_the_store_of_a_master_that_is_not_confirmed_refuses_messages(tmp_path: Path) -> None:
    with broker_fixture(tmp_path, settings(slave=False)) as env:
        env.store.writer.refusal = MasterNotConfirmed("no controller answers")
        for _ in range(3):
            env.tick(1_000)
            assert isinstance(env.store.refusal, MasterNotConfirmed)


def test_a_slave_serves_no_pulls_before_a_master_has_confirmed_its_log(tmp_path: Path) -> None:
    with slave(tmp_path, messages=3) as env:
        env.broker.role.hides_log = True
        answer = reply(env.pull())
        assert answer.code == ResponseCode.SYSTEM_BUSY
        assert "confirmed" in (answer.remark or "")
        env.broker.role.hides_log = False
        assert len(bodies(env.pull())) == 3


def test_nothing_is_delivered_by_time(tmp_path: Path) -> None:
    with broker_fixture(tmp_path, settings(slave=False)) as env:
        env.send(properties={"DELAY": "1"})
        env.send(properties={"TIMER_DELIVER_MS": str(NOW_MS + 5_000)})
        env.send(properties={"TRAN_MSG": "true", "PGROUP": "P"})
    with broker_fixture(tmp_path, settings(), role=ReplicaRole(slave=True)) as env:
        end = env.store.log.end
        for _ in range(10):
            env.tick(HOUR_MS)
        assert env.store.log.end == end
        assert env.broker.due() > env.now_ms
    with broker_fixture(tmp_path, settings(slave=False)) as env:
        assert env.store.log.end == end
        for _ in range(100):
            env.tick(100)
        assert len(bodies(env.pull())) == 2  # delayed and timer message, each once


def test_a_note_of_delivered_offsets_is_deleted(tmp_path: Path) -> None:
    with broker_fixture(tmp_path, settings(slave=False)) as env:
        env.send(properties={"DELAY": "1"})
        for _ in range(20):
            env.tick(100)
        note = env.store.paths.delivered
        assert note.exists()
    with slave(tmp_path):
        assert not note.exists()


def test_a_slave_has_metrics_without_those_of_its_services(tmp_path: Path) -> None:
    with slave(tmp_path) as env:
        text = broker_metrics(env.broker, GroupLags(env.broker.context)).text()
        assert "rocketmq_topic_number" in text
        assert "rocketmq_half_messages" not in text
        info = env.ask(RequestCode.GET_BROKER_RUNTIME_INFO).body
        assert b'"brokerActive":"false"' in info


# --- tables --------------------------------------------------------------------------------------


def test_heartbeats_are_served_without_changing_the_tables(tmp_path: Path) -> None:
    with slave(tmp_path) as env:
        topics, groups = dict(env.context.topics.table.topics), env.context.groups.table.groups
        before = dict(groups)
        env.heartbeat()
        assert env.context.clients.consumer_group("G") is not None
        assert env.context.topics.table.topics == topics
        assert env.context.groups.table.groups == before
        env.context.topics.mark_ordered(["T"], NOW_MS)
        assert env.context.topics.need("T").order is False


def test_queues_without_a_topic_are_not_adopted(tmp_path: Path) -> None:
    with broker_fixture(tmp_path, settings(slave=False)) as env:
        env.send("New")
        env.context.topics.table.remove("New", NOW_MS)
    with broker_fixture(tmp_path, settings(), role=ReplicaRole(slave=True)) as env:
        assert env.context.topics.get("New") is None


def test_commits_are_taken_and_kept_for_the_master(tmp_path: Path) -> None:
    with slave(tmp_path, messages=3) as env:
        env.context.groups.table.seed(env.context.groups.find("G", NOW_MS))
        ext = {"consumerGroup": "G", "topic": "T", "queueId": "0"}
        done = env.ask(RequestCode.UPDATE_CONSUMER_OFFSET, {**ext, "commitOffset": "2"})
        assert done.code == 0
        found = env.ask(RequestCode.QUERY_CONSUMER_OFFSET, ext)
        assert (found.ext or {})["offset"] == "2"
        assert env.broker.role.commits == {("G", "T", 0): 2}
        env.context.persistence.save(env.context.offsets.table)()
        state = ReplicaState()  # as after a crash
        state.load(env.context.persistence.file(ReplicaState.FILE))
        assert state.commits() == {("G", "T", 0): 2}
    role = ReplicaRole(slave=True, master_address=MASTER)
    with broker_fixture(tmp_path, settings(), role=role) as env:
        assert role.commits == {("G", "T", 0): 2}
        role.commits.clear()
        assert env.broker.replicated is not None
        env.broker.replicated.commits_sent()
    role = ReplicaRole(slave=True, master_address=MASTER)
    with broker_fixture(tmp_path, settings(), role=role):
        assert role.commits == {}


# --- pulls ---------------------------------------------------------------------------------------


def test_pulls_are_refused_unless_slaves_may_be_read(tmp_path: Path) -> None:
    with slave(tmp_path, read=False, messages=1) as env:
        answer = reply(env.pull())
        assert answer.code == ResponseCode.SYSTEM_BUSY
        assert (answer.remark or "").startswith("[REJECTREQUEST]system busy")
        assert MASTER in (answer.remark or "")
        env.live.change({"slaveReadEnable": "true"})
        assert bodies(env.pull()) == [b"0"]


def test_messages_are_read(tmp_path: Path) -> None:
    with slave(tmp_path, messages=3, online=True) as env:
        assert bodies(env.pull(1)) == [b"1", b"2"]
        assert env.broker.router.in_place.keys() >= PULLS


def test_a_consumer_that_has_everything_is_sent_to_the_master(tmp_path: Path) -> None:
    with slave(tmp_path, messages=3, online=True) as env:
        answer = reply(env.pull(3, flags=6))
        ext = answer.ext or {}
        assert answer.code == ResponseCode.PULL_RETRY_IMMEDIATELY
        assert (ext["suggestWhichBrokerId"], ext["nextBeginOffset"]) == ("0", "3")


def test_without_a_master_the_slave_suggests_itself(tmp_path: Path) -> None:
    """A consumer that is sent to a master that has gone loses time before it comes back."""
    with slave(tmp_path, messages=3) as env:
        for offset, expected in ((0, [b"0", b"1"]), (2, [b"2"])):
            answer = env.pull(offset, maxMsgNums=2)
            assert bodies(answer) == expected
            assert suggested(answer) == 1
        assert isinstance(env.pull(3, flags=6), Suspend)
        env.tick(16_000)
        assert suggested(env.woken.pop()) == 1
        env.broker.role.master_online = True
        assert suggested(env.pull(0)) == 0


def test_without_a_master_the_pull_is_suspended(tmp_path: Path) -> None:
    with slave(tmp_path, messages=3) as env:
        assert isinstance(env.pull(3, flags=6), Suspend)
        env.tick(16_000)
        (answer,) = env.woken
        assert answer.code == ResponseCode.PULL_NOT_FOUND


def test_a_suspended_pull_gets_new_messages(tmp_path: Path) -> None:
    with slave(tmp_path, messages=3) as env:
        assert isinstance(env.pull(3, flags=6), Suspend)
        receive(env, b"new")
        (answer,) = env.woken
        assert bodies(answer) == [b"new"]


@pytest.mark.parametrize("online", [True, False])
def test_an_offset_is_never_corrected(tmp_path: Path, online: bool) -> None:
    """The slave may be behind its master: the offset is right, the message has not arrived."""
    with slave(tmp_path, messages=3, online=online) as env:
        for _ in range(2):
            answer = env.pull(10, flags=6)
            if not online:
                assert isinstance(answer, Suspend)
                receive(env, b"new")
                answer = env.woken.pop()
            ext = reply(answer).ext or {}
            assert reply(answer).code == ResponseCode.PULL_RETRY_IMMEDIATELY
            expected = "0" if online else "1"
            assert (ext["suggestWhichBrokerId"], ext["nextBeginOffset"]) == (expected, "10")
        assert reply(env.pull(10)).code == ResponseCode.PULL_RETRY_IMMEDIATELY  # may not wait


def receive(env: BrokerFixture, body: bytes, topic: str = "T") -> None:
    """A message arrives by replication."""
    refused, env.store.writer.refusal = env.store.refusal, None
    assert env.store.put(Message(topic, 0, body).record(), env.now_ms) == PUT_OK
    env.store.writer.refusal = refused
    env.store.publish()
