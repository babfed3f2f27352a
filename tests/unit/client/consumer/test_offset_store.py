"""Commits of offsets to brokers and files."""

import json
from pathlib import Path

import pytest

from penstock.client.consumer.offset_store import (
    FILE_BYTES_MAX,
    LocalFileOffsetStore,
    RemoteBrokerOffsetStore,
)
from penstock.client.messages import MessageQueue
from penstock.errors import BadSetting, GroupNotExist, PeerUnreachable, Refused
from penstock.wire.codes import RequestCode, ResponseCode
from tests.unit.client.consumer.group_kit import GROUP, FakeCluster, FakeSession, run

Q = MessageQueue("t", "a", 0)
R = MessageQueue("t", "b", 1)


def remote() -> tuple[FakeCluster, RemoteBrokerOffsetStore]:
    cluster = FakeCluster()
    cluster.add_topic("t", {"a": 2, "b": 2})
    return cluster, RemoteBrokerOffsetStore(FakeSession(cluster).real, GROUP)


def test_offsets_in_memory_only_increase_by_default() -> None:
    _, offsets = remote()
    offsets.update(Q, 5)
    offsets.update(Q, 3)
    assert offsets.get(Q) == 5
    offsets.update(Q, 3, only_up=False)
    assert offsets.snapshot() == {Q: 3}
    offsets.freeze(Q, 1)
    offsets.update(Q, 9)
    assert offsets.get(Q) == 1
    offsets.forget(Q)
    offsets.update(Q, 9)
    assert offsets.snapshot("t") == {Q: 9}
    assert offsets.snapshot("other") == {}


def test_changed_offsets_are_stored_and_all_of_them_once_a_minute() -> None:
    async def body() -> None:
        cluster, offsets = remote()
        offsets.update(Q, 5)
        offsets.update(R, 6)
        await offsets.persist()
        assert cluster.stored == {Q: 5, R: 6}
        assert cluster.count(RequestCode.UPDATE_CONSUMER_OFFSET) == 2
        assert cluster.log[0][2]["consumerGroup"] == GROUP
        offsets.update(Q, 7)
        for _ in range(59):
            await cluster.clock.elapse(1_000)
            await offsets.persist()
        assert cluster.count(RequestCode.UPDATE_CONSUMER_OFFSET) == 3
        cluster.stored.clear()  # as a broker after a crash
        await cluster.clock.elapse(1_000)
        await offsets.persist()
        assert cluster.stored == {Q: 7, R: 6}

    run(body())


def test_commits_of_a_queue_are_sent_one_at_a_time() -> None:
    """A broker with several threads may handle two at once in the other order."""

    async def body() -> None:
        cluster, offsets = remote()
        session = FakeSession(cluster)
        answer = cluster.delay(RequestCode.UPDATE_CONSUMER_OFFSET)
        offsets.update(Q, 5)
        first = session.spawn(offsets.persist())
        await cluster.clock.elapse(0)
        offsets.update(Q, 7)
        last = session.spawn(offsets.persist())
        await cluster.clock.elapse(0)
        assert cluster.count(RequestCode.UPDATE_CONSUMER_OFFSET) == 1
        answer.set()
        await first
        await last
        assert cluster.stored == {Q: 7}
        await session.end()

    run(body())


def test_first_commits_in_a_topic_of_a_broker_are_sent_one_at_a_time() -> None:
    """Apache's brokers create a table for the topic with the first one, and may do so twice."""

    async def body() -> None:
        cluster, offsets = remote()
        session = FakeSession(cluster)
        answer = cluster.delay(RequestCode.UPDATE_CONSUMER_OFFSET)
        queues = [Q, MessageQueue("t", "a", 1), R]

        async def requests_at_once(offset: int) -> int:
            before = cluster.count(RequestCode.UPDATE_CONSUMER_OFFSET)
            for queue in queues:
                offsets.update(queue, offset)
            storing = session.spawn(offsets.persist())
            await cluster.clock.elapse(0)
            sent = cluster.count(RequestCode.UPDATE_CONSUMER_OFFSET) - before
            answer.set()
            await storing
            answer.clear()
            return sent

        assert await requests_at_once(5) == 2  # one at each broker
        assert await requests_at_once(6) == 3
        assert cluster.stored == dict.fromkeys(queues, 6)
        await session.end()

    run(body())


def test_failed_commit_is_retried(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        cluster, offsets = remote()
        offsets.update(Q, 5)
        offsets.update(R, 6)
        cluster.down = {"a"}
        await offsets.persist()
        await offsets.persist()
        assert cluster.stored == {R: 6}
        assert caplog.text.count("cannot store offsets at broker a") == 1
        with pytest.raises(PeerUnreachable):
            await offsets.commit(Q, 5)
        cluster.down = set()
        await offsets.persist([R])
        assert cluster.stored == {R: 6}
        await offsets.persist([Q, R])
        assert cluster.stored == {Q: 5, R: 6}

    run(body())


def test_read_returns_none_for_nothing_stored_and_raises_for_unknown() -> None:
    async def body() -> None:
        cluster, offsets = remote()
        assert await offsets.read(Q) is None
        cluster.stored[Q] = 12
        assert await offsets.read(Q) == offsets.get(Q) == 12
        await offsets.persist()
        assert cluster.count(RequestCode.UPDATE_CONSUMER_OFFSET) == 0, "it came from there"
        cluster.stored[Q] = -4
        with pytest.raises(Refused, match="-4"):
            await offsets.read(Q)
        cluster.refuse[RequestCode.QUERY_CONSUMER_OFFSET] = (
            ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST
        )
        with pytest.raises(GroupNotExist):
            await offsets.read(Q)

    run(body())


def test_broadcast_offsets_are_kept_in_memory() -> None:
    async def body() -> None:
        offsets = LocalFileOffsetStore()
        await offsets.load()
        assert await offsets.read(Q) is None
        offsets.update(Q, 5)
        await offsets.persist()
        offsets.forget(Q)
        assert offsets.get(Q) is None
        assert await offsets.read(Q) == 5

    run(body())


def test_broadcast_offsets_are_stored_in_a_file(tmp_path: Path) -> None:
    async def body() -> None:
        path = tmp_path / "deep" / "offsets.json"
        offsets = LocalFileOffsetStore(path)
        await offsets.load()
        await offsets.commit(Q, 5)
        offsets.update(R, 6)
        await offsets.persist([R])
        assert sorted(p.name for p in path.parent.iterdir()) == ["offsets.json", "offsets.json.bak"]
        offsets.forget(Q)
        offsets.update(R, 7)
        await offsets.persist()
        written = path.stat().st_mtime_ns
        await offsets.persist()
        assert path.stat().st_mtime_ns == written, "nothing new is not written"
        again = LocalFileOffsetStore(path)
        await again.load()
        assert [await again.read(Q), await again.read(R)] == [5, 7]
        path.write_bytes(b"")
        older = LocalFileOffsetStore(str(path))
        await older.load()
        assert [await older.read(Q), await older.read(R)] == [5, 6]

    run(body())


def test_offset_file_has_javas_format(tmp_path: Path) -> None:
    """The text is what a Java client wrote."""

    async def body() -> None:
        path = tmp_path / "offsets.json"
        path.write_text(
            '{\n\t"offsetTable":{{\n\t\t\t"brokerName":"a",\n\t\t\t"queueId":0,\n\t\t\t"topic":"t"'
            '\n\t\t}:41\n\t}\n}'
        )  # fmt: skip
        offsets = LocalFileOffsetStore(path)
        await offsets.load()
        assert await offsets.read(Q) == 41
        await offsets.commit(Q, 42)
        text = path.read_text()
        assert '"brokerName":"a"' in text
        assert text.replace("\n", "").replace("\t", "").endswith("}:42}}")

    run(body())


def test_corrupt_offset_file_is_reported_and_not_overwritten(tmp_path: Path) -> None:
    async def body() -> None:
        path = tmp_path / "offsets.json"
        path.write_text(json.dumps({"offsetTable": "?"}))
        with pytest.raises(BadSetting, match=r"offsets\.json"):
            await LocalFileOffsetStore(path).load()

    run(body())


def test_failed_write_of_the_offset_file_is_retried(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> None:
        path = tmp_path / "offsets.json"
        (tmp_path / "offsets.json.tmp").mkdir()
        offsets = LocalFileOffsetStore(path)
        offsets.update(Q, 5)
        await offsets.persist()
        assert "cannot store offsets" in caplog.text
        (tmp_path / "offsets.json.tmp").rmdir()
        await offsets.persist()
        assert path.exists()

    run(body())


def test_reset_offset_is_stored_despite_later_progress() -> None:
    async def body() -> None:
        cluster, offsets = remote()
        queue = Q
        cluster.stored[queue] = 5
        assert await offsets.read(queue) == 5
        offsets.update(queue, 90)
        cluster.stored[queue] = 90  # sent with a pull
        offsets.freeze(queue, 5)
        await offsets.persist([queue])
        assert cluster.stored[queue] == 5

    run(body())


def test_negative_offsets_in_the_file_are_ignored(tmp_path: Path) -> None:
    async def body() -> None:
        path = tmp_path / "offsets.json"
        rows = '{"brokerName":"a","queueId":0,"topic":"t"}:-7,'
        rows += '{"brokerName":"a","queueId":1,"topic":"t"}:7'
        path.write_text('{"offsetTable":{' + rows + "}}")
        offsets = LocalFileOffsetStore(path)
        await offsets.load()
        assert await offsets.read(MessageQueue("t", "a", 0)) is None
        assert await offsets.read(MessageQueue("t", "a", 1)) == 7
        path.write_bytes(b" " * (FILE_BYTES_MAX + 1))
        with pytest.raises(BadSetting, match="bytes"):
            await LocalFileOffsetStore(path).load()

    run(body())
