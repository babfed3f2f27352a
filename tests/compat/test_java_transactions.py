"""Real Java clients: transactions that are committed, rolled back, forgotten, asked for."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.depth import rounds

from . import clusters
from .java_session import ClientError, JavaSession, eventually
from .reading import read_all
from .variants import any_client, each_release

pytestmark = [pytest.mark.compat, pytest.mark.slow]

ours_only = pytest.mark.skipif(clusters.APACHE, reason="Apache does it otherwise")

END_TRANSACTION = 37
UNKNOWN, COMMIT, ROLLBACK = 0, 8, 12
ILLEGAL_OPERATION = 604

HALF_TOPIC = "RMQ_SYS_TRANS_HALF_TOPIC"
PARKED_TOPIC = "TRANS_CHECK_MAX_TIME_TOPIC"
TRACE_TOPIC = "RMQ_SYS_TRACE_TOPIC"

QUICK: dict[str, Any] = {
    "transactionTimeOut": 1000,
    "transactionCheckInterval": 1000,
    "transactionCheckMax": 5,
    "traceTopicEnable": True,
}
if clusters.APACHE:
    # Its check would otherwise ask again for what is finished but not yet noted in the op topic.
    QUICK["transactionOpBatchInterval"] = 100

NOBODY_S = 0 if clusters.APACHE else 8
"""How long a half is left without a producer: longer than five checks, which Apache would count."""

Line = dict[str, Any]


@pytest.fixture(scope="module")
def trading(java: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[clusters.Cluster]:
    """A cluster that asks after a second, every second."""
    with clusters.running(
        tmp_path_factory.mktemp("trading"), brokerName="trading", **QUICK
    ) as cluster:
        yield cluster


def message(topic: str, body: str, local: str, checks: str = "unknown", **more: Any) -> Line:
    properties = {"local": local, "checks": checks, **more.pop("properties", {})}
    return {"topic": topic, "body": body, "properties": properties, **more}


def start(client: JavaSession, cluster: clusters.Cluster, name: str, **options: Any) -> None:
    options = {"group": name, **options}
    client.do("tx.start", producer=name, namesrv=cluster.namesrv, **options)


def send(client: JavaSession, producer: str, messages: list[Line]) -> list[Line]:
    lines: list[Line] = client.do("tx.send", producer=producer, messages=messages)
    assert {line.get("status") for line in lines} == {"SEND_OK"}, lines
    return lines


def checks(
    client: JavaSession, producer: str, count: int = 0, within_ms: int = 30_000
) -> list[Line]:
    asked: list[Line] = client.do("tx.checks", producer=producer, count=count, within_ms=within_ms)
    return asked


def offset_of(line: Line) -> int:
    """The place in the log that an offset id tells."""
    return int(line["offset_msg_id"][-16:], 16)


def end(
    client: JavaSession, cluster: clusters.Cluster, producer: str, line: Line, how: int, **ext: str
) -> Line:
    """What the broker answers to END_TRANSACTION that wants an answer."""
    fields = {
        "topic": "any",
        "producerGroup": producer,
        "tranStateTableOffset": str(line["queue_offset"]),
        "commitLogOffset": str(offset_of(line)),
        "commitOrRollback": str(how),
        "fromTransactionCheck": "false",
        "msgId": line["msg_id"],
        "transactionId": line["transaction_id"],
        "bname": cluster.broker,
        **ext,
    }
    answer: Line = client.do(
        "tx.ask",
        producer=producer,
        address=cluster.broker_address,
        code=END_TRANSACTION,
        ext=fields,
    )
    return answer


def bodies(client: JavaSession, cluster: clusters.Cluster, topic: str, count: int) -> list[str]:
    """The bodies in a topic that a push consumer saw, once there are `count` and no more come."""
    name = f"see-{topic}"
    client.do("push.start", consumer=name, namesrv=cluster.namesrv, group=name, topics={topic: "*"})
    client.do("push.received", consumer=name, count=count, within_ms=30_000)
    rows = client.do("push.received", consumer=name, count=count + 1, within_ms=1_500)
    client.do("push.stop", consumer=name)
    return sorted(row[3] for row in rows)


@each_release
def test_committed_messages_arrive_and_no_others(
    client: JavaSession, trading: clusters.Cluster, fresh: str
) -> None:
    start(client, trading, fresh)
    lines = send(
        client, fresh,
        [
            message(fresh, "committed", "commit"),
            message(fresh, "rolled back", "rollback"),
            message(fresh, "thrown, committed later", "throw", "commit"),
            message(fresh, "nothing said, rolled back later", "null", "rollback"),
            message(fresh, "unknown, committed later", "unknown", "unknown,commit"),
            message(fresh, "unknown, rolled back later", "unknown", "unknown,rollback"),
        ],
    )  # fmt: skip
    assert [line["state"] for line in lines] == [
        "COMMIT_MESSAGE", "ROLLBACK_MESSAGE", "UNKNOW", "UNKNOW", "UNKNOW", "UNKNOW",
    ]  # fmt: skip
    for line in lines:
        assert line["transaction_id"] == line["msg_id"]
        assert 0 <= line["queue_id"] < 4
    places = [line["queue_offset"] for line in lines]  # in the queue of halves
    assert places == sorted(places)
    assert len({offset_of(line) for line in lines}) == len(lines)
    asked = checks(client, fresh, 6)
    times = Counter(check["body"] for check in asked)
    assert times == {
        "thrown, committed later": 1,
        "nothing said, rolled back later": 1,
        "unknown, committed later": 2,
        "unknown, rolled back later": 2,
    }
    wanted = ["committed", "thrown, committed later", "unknown, committed later"]
    assert bodies(client, trading, fresh, 3) == wanted
    assert len(checks(client, fresh)) == 6
    client.do("tx.stop", producer=fresh)


@any_client
def test_what_a_check_asks_about(
    client: JavaSession, trading: clusters.Cluster, fresh: str
) -> None:
    start(client, trading, fresh)
    sent_ms = time.time() * 1000
    half = message(fresh, "b", "unknown", "unknown,commit", tags="A", keys=["k1", "k2"], flag=7)
    (line,) = send(client, fresh, [half])
    first, second = checks(client, fresh, 2)
    for check in (first, second):
        assert check["topic"] == fresh
        assert check["queue_id"] == line["queue_id"]
        assert check["transaction_id"] == line["transaction_id"]
        assert (check["body"], check["tags"], check["keys"]) == ("b", "A", "k1 k2")
        assert check["flag"] == 7 or clusters.APACHE  # which loses it with its second copy
        assert check["born_host"] == "127.0.0.1"
        assert check["properties"]["PGROUP"] == fresh
        assert check["properties"]["TRAN_MSG"] == "true"
        assert check["properties"]["UNIQ_KEY"] == line["msg_id"]
        assert check["time_ms"] >= sent_ms + QUICK["transactionTimeOut"]
    times = [check["properties"]["TRANSACTION_CHECK_TIMES"] for check in (first, second)]
    assert times == ["1", "2"]
    assert second["time_ms"] > first["time_ms"]
    assert bodies(client, trading, fresh, 1) == ["b"]
    client.do("tx.stop", producer=fresh)


@any_client
def test_what_a_committed_message_looks_like(
    client: JavaSession, trading: clusters.Cluster, fresh: str
) -> None:
    start(client, trading, fresh)
    began_ms = time.time() * 1000
    lines = send(
        client, fresh,
        [
            message(fresh, "x", "commit", tags="A", keys=["k"], flag=5, properties={"of": "mine"}),
            # Clients leave out the delay of a transactional message.
            message(fresh, "y", "commit", delay_level=18),
            message(fresh, "z" * 10_000, "unknown", "commit"),
        ],
    )  # fmt: skip
    found: list[Line] = eventually(
        lambda: [] if len(seen := read_all(client, trading, fresh)) < 3 else seen
    )
    by_id = {seen["msg_id"]: seen for seen in found}
    assert set(by_id) == {line["msg_id"] for line in lines}
    for line in lines:
        seen = by_id[line["msg_id"]]
        assert seen["topic"] == fresh
        assert seen["queue_id"] == line["queue_id"]
        assert seen["queue_offset"] < len(lines)
        assert seen["transaction_id"] == line["transaction_id"]
        assert seen["sys_flag"] & 0x0C == COMMIT
        assert seen["physical_offset"] > offset_of(line)
        assert seen["born_host"] == "127.0.0.1"
        assert began_ms - 1 <= seen["born_timestamp"] <= seen["store_timestamp"]
        assert (seen["body_crc"], seen["body_length"]) == (line["body_crc"], line["body_length"])
        assert seen["reconsume_times"] == 0
    first, second, third = (by_id[line["msg_id"]] for line in lines)
    assert first["prepared_offset"] == offset_of(lines[0])
    assert (first["tags"], first["keys"], first["flag"]) == ("A", "k", 5)
    assert first["properties"] == first["properties"] | {
        "of": "mine", "local": "commit", "TRAN_MSG": "true", "PGROUP": fresh,
        "UNIQ_KEY": lines[0]["msg_id"], "__transactionId__": lines[0]["msg_id"],
        "TAGS": "A", "KEYS": "k",
    }  # fmt: skip
    assert "REAL_TOPIC" not in first["properties"]
    assert "DELAY" not in second["properties"]
    # The third one was committed by the answer to a check; Apache names the copy that it made.
    if clusters.APACHE:
        assert third["prepared_offset"] > offset_of(lines[2])
    else:
        assert third["prepared_offset"] == offset_of(lines[2])
    assert third["properties"]["TRANSACTION_CHECK_TIMES"] == "1"
    names = set(third["properties"]) - set(second["properties"])
    assert names - {"TRAN_PREPARED_QUEUE_OFFSET"} == {"TRANSACTION_CHECK_TIMES"}
    # Tags and keys find it as they find any other.
    assert len(read_all(client, trading, fresh, expression="A")) == 1
    client.do("producer.start", producer=f"q-{fresh}", namesrv=trading.namesrv)
    found = eventually(
        lambda: client.do("producer.query", producer=f"q-{fresh}", topic=fresh, key="k")
    )
    assert [one["msg_id"] for one in found] == [lines[0]["msg_id"]]
    client.do("tx.stop", producer=fresh)


@any_client
def test_after_five_unknown_answers_a_half_is_parked(
    client: JavaSession, trading: clusters.Cluster, fresh: str
) -> None:
    start(client, trading, fresh)
    half = message(fresh, "nobody knows", "unknown", "unknown", tags="A", keys=["k"])
    (line,) = send(client, fresh, [half])

    def look() -> list[Line]:
        try:
            parked = read_all(client, trading, PARKED_TOPIC)
        except ClientError:  # the topic comes with the first of them
            return []
        return [one for one in parked if one["msg_id"] == line["msg_id"]]

    (parked,) = eventually(look, within_s=60)
    assert parked["topic"] == PARKED_TOPIC
    assert (parked["tags"], parked["keys"]) == ("A", "k")
    assert parked["body_crc"] == line["body_crc"]
    assert parked["properties"] == parked["properties"] | {
        "REAL_TOPIC": fresh, "REAL_QID": str(line["queue_id"]), "PGROUP": fresh,
        "TRANSACTION_CHECK_TIMES": "5", "UNIQ_KEY": line["msg_id"],
    }  # fmt: skip
    assert len(checks(client, fresh)) == 5
    assert checks(client, fresh, 6, within_ms=3_000)[5:] == []
    assert len(look()) == 1
    assert read_all(client, trading, fresh) == []
    client.do("tx.stop", producer=fresh)


@any_client
def test_another_producer_of_the_group_is_asked(
    client: JavaSession, trading: clusters.Cluster, fresh: str
) -> None:
    start(client, trading, f"{fresh}-1", group=fresh)
    lines = send(
        client, f"{fresh}-1",
        [
            message(fresh, "to be committed", "unknown", "commit"),
            message(fresh, "to be rolled back", "unknown", "rollback"),
        ],
    )  # fmt: skip
    client.do("tx.stop", producer=f"{fresh}-1")
    time.sleep(NOBODY_S)  # nobody is there to be asked
    start(client, trading, f"{fresh}-2", group=fresh)
    # Clients of 5.x know of no broker before they send.
    send(client, f"{fresh}-2", [message(fresh, "hello", "commit")])
    asked = checks(client, f"{fresh}-2", 2)
    assert Counter(check["transaction_id"] for check in asked) == {
        line["transaction_id"]: 1 for line in lines
    }
    assert bodies(client, trading, fresh, 2) == ["hello", "to be committed"]
    client.do("tx.stop", producer=f"{fresh}-2")


@any_client
def test_an_immunity_of_its_own(client: JavaSession, trading: clusters.Cluster, fresh: str) -> None:
    start(client, trading, fresh)
    born_ms = time.time() * 1000
    immune = {"CHECK_IMMUNITY_TIME_IN_SECONDS": "3"}
    lines = send(
        client, fresh,
        [
            message(fresh, "patient", "unknown", "commit", properties=immune),
            message(fresh, "early", "unknown", "unknown", properties=immune),
        ],
    )  # fmt: skip
    assert end(client, trading, fresh, lines[1], COMMIT)["code"] == 0
    asked = checks(client, fresh, 1)
    assert [check["body"] for check in asked] == ["patient"]
    assert asked[0]["time_ms"] >= born_ms + 3000
    assert bodies(client, trading, fresh, 2) == ["early", "patient"]
    late = end(client, trading, fresh, lines[1], COMMIT)
    if clusters.APACHE:
        assert late["code"] == ILLEGAL_OPERATION
    client.do("tx.stop", producer=fresh)


@any_client
def test_ending_by_a_request_that_is_answered(
    client: JavaSession, trading: clusters.Cluster, fresh: str
) -> None:
    start(client, trading, fresh)
    good, bad, wrong = send(
        client, fresh, [message(fresh, body, "unknown") for body in ("good", "bad", "wrong")]
    )
    assert end(client, trading, fresh, good, COMMIT)["code"] == 0
    assert end(client, trading, fresh, bad, ROLLBACK)["code"] == 0
    # Not this group's, not at this place of the queue, nothing there.
    assert end(client, trading, fresh, wrong, COMMIT, producerGroup="another")["code"] == 1
    shifted = str(wrong["queue_offset"] + 1)
    assert end(client, trading, fresh, wrong, COMMIT, tranStateTableOffset=shifted)["code"] == 1
    assert end(client, trading, fresh, wrong, COMMIT, commitLogOffset="999999999")["code"] == 1
    assert bodies(client, trading, fresh, 1) == ["good"]
    assert end(client, trading, fresh, wrong, ROLLBACK)["code"] == 0
    client.do("tx.stop", producer=fresh)


@ours_only  # Apache appends again what was done before, and commits what was rolled back.
@any_client
def test_what_was_ended_stays_ended(
    client: JavaSession, trading: clusters.Cluster, fresh: str
) -> None:
    start(client, trading, fresh)
    good, bad, asked, open_ = send(
        client, fresh,
        [
            message(fresh, "good", "unknown"),
            message(fresh, "bad", "unknown"),
            message(fresh, "asked", "unknown", "commit"),
            message(fresh, "open", "unknown", "unknown,unknown,rollback"),
        ],
    )  # fmt: skip
    answer = end(client, trading, fresh, open_, UNKNOWN)  # Apache does not answer at all
    assert answer["code"] is not None
    done = end(client, trading, fresh, good, COMMIT)
    gone = end(client, trading, fresh, bad, ROLLBACK)
    assert (done["code"], gone["code"]) == (0, 0)
    checks(client, fresh, 1)
    for _ in range(3):
        again = end(client, trading, fresh, good, COMMIT)
        assert again["code"] == 0
        assert end(client, trading, fresh, bad, ROLLBACK)["code"] == 0
        assert end(client, trading, fresh, bad, COMMIT)["code"] != 0
        assert end(client, trading, fresh, good, ROLLBACK)["code"] != 0
        time.sleep(1)  # checks come between
    # By the first handle too, when a check has made a copy of the half.
    assert end(client, trading, fresh, asked, COMMIT)["code"] == 0
    assert end(client, trading, fresh, asked, ROLLBACK)["code"] != 0
    assert bodies(client, trading, fresh, 2) == ["asked", "good"]
    client.do("tx.stop", producer=fresh)


@any_client
def test_traced_transactions(client: JavaSession, trading: clusters.Cluster, fresh: str) -> None:
    start(client, trading, fresh, trace=True)
    lines = send(
        client, fresh,
        [message(fresh, "good", "commit"), message(fresh, "bad", "rollback")],
    )  # fmt: skip

    def traced() -> bool:
        keys = Counter(
            key
            for trace in read_all(client, trading, TRACE_TOPIC)
            for key in (trace["keys"] or "").split()
        )
        return all(keys[line["msg_id"]] for line in lines)

    assert eventually(traced)
    assert bodies(client, trading, fresh, 1) == ["good"]
    client.do("tx.stop", producer=fresh)


@pytest.mark.usefixtures("java")
def test_halves_survive_the_death_of_the_broker(
    tmp_path: Path, start_java: Callable[..., JavaSession], fresh: str
) -> None:
    client = start_java()
    with clusters.running(tmp_path, brokerName="mortal", **QUICK) as cluster:
        start(client, cluster, fresh, poll_namesrv_ms=1000)
        lines = send(
            client, fresh,
            [
                message(fresh, "decided before", "commit"),
                message(fresh, "rolled back before", "rollback"),
                message(fresh, "asked after", "unknown", "commit"),
                message(fresh, "ended after", "unknown"),
                message(fresh, "rolled back after", "unknown"),
            ],
        )  # fmt: skip
        wanted = ["asked after", "decided before", "ended after"]
        cluster.server.kill()
        cluster.server.start()
        end_again(client, cluster, fresh, lines[3], COMMIT)
        assert end(client, cluster, fresh, lines[4], ROLLBACK)["code"] == 0
        assert set(bodies(client, cluster, fresh, 3)) == set(wanted)
        if clusters.APACHE:
            return
        for _ in range(rounds(ci=1, proof=3)):
            cluster.server.kill()
            cluster.server.start()
            end_again(client, cluster, fresh, lines[3], COMMIT)
            for line, same, other in (
                (lines[0], COMMIT, ROLLBACK), (lines[2], COMMIT, ROLLBACK),
                (lines[3], COMMIT, ROLLBACK), (lines[4], ROLLBACK, COMMIT),
            ):  # fmt: skip
                assert end(client, cluster, fresh, line, same)["code"] == 0
                assert end(client, cluster, fresh, line, other)["code"] != 0
        found = Counter(one["msg_id"] for one in read_all(client, cluster, fresh))
        assert found == {lines[n]["msg_id"]: 1 for n in (0, 2, 3)}


def end_again(
    client: JavaSession, cluster: clusters.Cluster, producer: str, line: Line, how: int
) -> None:
    """End a transaction as soon as the broker can be reached again."""

    def ended() -> bool:
        try:
            return bool(end(client, cluster, producer, line, how)["code"] == 0)
        except ClientError:
            return False

    assert eventually(ended)
