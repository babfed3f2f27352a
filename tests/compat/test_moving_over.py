"""Moving over from Apache by a slave, and back: the steps of docs/replication.md with Java clients.

Clients run all the time. Messages that are in flight during the change are included: a delayed
message, a timer message, and a transaction whose producer decides later.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from penstock.wire.codes import RequestCode, ResponseCode
from tests.depth import rounds

from . import apache, clusters, maven, penstock
from .conftest import Sessions
from .java_session import ClientError, JavaSession, eventually
from .test_replication import AnyBroker, await_log, await_master, call, log_end

pytestmark = [
    pytest.mark.compat,
    pytest.mark.slow,
    pytest.mark.skipif(clusters.APACHE, reason="both kinds of server take part"),
]

NAME, TOPIC, GROUP = "moving", "moving-topic", "moving-group"
QUEUES = 4
BODY = 3
"""Index of the body in what a push consumer tells of a message."""
POLL = {"poll_namesrv_ms": 1000}
BROKER: dict[str, Any] = {
    "brokerName": NAME,
    "brokerIP2": "127.0.0.1",
    "haSendHeartbeatInterval": 200,
    "transactionTimeOut": 1000,
    "transactionCheckInterval": 1000,
    "timerWheelEnable": True,
    **apache.SMALL_STORE,
}
READ_ONLY = 4
WAIT_FOR_APACHE = bool(rounds(ci=0, proof=1))


class Clients:
    """A Java producer, one with transactions, and a push consumer, which never stop."""

    def __init__(self, java: JavaSession, namesrv: str) -> None:
        self.java = java
        self.sent: set[str] = set()
        for kind in ("producer", "timer", "tx"):
            java.do(f"{kind}.start", producer=kind, group=kind, namesrv=namesrv, **POLL)
        java.do("producer.create_topic", producer="producer", topic=TOPIC, queues=QUEUES)

    def consume(self, namesrv: str) -> None:
        topics = {TOPIC: "*"}
        self.java.do(
            "push.start", consumer=GROUP, namesrv=namesrv, group=GROUP, topics=topics, **POLL
        )

    def send(self, prefix: str, count: int, **options: Any) -> None:
        """Send messages; each is repeated until a broker has taken it."""
        for number in range(count):
            body = f"{prefix}-{number}"
            assert eventually(lambda body=body: self._is_sent(body, options), within_s=60)

    def _is_sent(self, body: str, options: dict[str, Any]) -> bool:
        message = {"topic": TOPIC, "body": body, **options}
        try:
            (line,) = self.java.do("producer.send", producer="producer", messages=[message])
        except ClientError:
            return False
        if line.get("status") != "SEND_OK":
            return False
        self.sent.add(body)
        return True

    def send_timer(self, body: str, *, due_s: int) -> None:
        message = {"topic": TOPIC, "body": body, "set": {"setDelayTimeSec": due_s}}
        (line,) = self.java.do("timer.send", producer="timer", messages=[message])
        assert line["status"] == "SEND_OK", line
        self.sent.add(body)

    def send_half(self, body: str) -> None:
        """A transaction: the producer answers the second question for it."""
        properties = {"local": "unknown", "checks": "unknown,commit"}
        message = {"topic": TOPIC, "body": body, "properties": properties}
        (line,) = self.java.do("tx.send", producer="tx", messages=[message])
        assert line["status"] == "SEND_OK"
        self.sent.add(body)

    def received(self) -> list[str]:
        return [row[BODY] for row in self.java.do("push.received", consumer=GROUP)]

    def repeated(self) -> list[str]:
        """What was received more than once."""
        return [body for body, count in Counter(self.received()).items() if count > 1]

    def await_all(self) -> None:
        eventually(lambda: set(self.received()) >= self.sent, within_s=60)
        assert set(self.received()) == self.sent

    def stop(self) -> None:
        self.java.do("push.stop", consumer=GROUP)
        for kind in ("producer", "tx"):
            self.java.do(f"{kind}.stop", producer=kind)


def pause_producers(broker: AnyBroker) -> None:
    body = f"brokerPermission={READ_ONLY}\n".encode()
    answer = call(broker.address, RequestCode.UPDATE_BROKER_CONFIG, {}, body)
    assert answer.code == ResponseCode.SUCCESS, answer.remark


def committed(broker: AnyBroker) -> list[str]:
    """The offsets of the group."""
    fields = {"consumerGroup": GROUP, "topic": TOPIC}
    answers = [
        call(broker.address, RequestCode.QUERY_CONSUMER_OFFSET, {**fields, "queueId": str(queue)})
        for queue in range(QUEUES)
    ]
    return [answer.ext.get("offset", "") for answer in answers]


def copy_tables(slave: apache.Broker, master: penstock.Broker) -> None:
    """Apache's slave copies topics and offsets once a minute; else it gets the topic from here."""
    if WAIT_FOR_APACHE:
        assert eventually(lambda: committed(slave) == committed(master), within_s=120)
        return
    fields = {
        "topic": TOPIC, "defaultTopic": "TBW102", "readQueueNums": str(QUEUES),
        "writeQueueNums": str(QUEUES), "perm": "6", "topicFilterType": "SINGLE_TAG",
        "topicSysFlag": "0", "order": "false",
    }  # fmt: skip
    answer = call(slave.address, RequestCode.UPDATE_AND_CREATE_TOPIC, fields)
    assert answer.code == ResponseCode.SUCCESS, answer.remark


def promote(namesrv: str) -> str:
    command = [sys.executable, "-m", "penstock.cli.main", "cluster", "promote", NAME, "1"]
    done = subprocess.run(
        [*command, "-n", namesrv, "--force", "--yes", "--role", "async_master"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("version", maven.SERVER_VERSIONS[-rounds(ci=1, proof=2) :])
def test_penstock_takes_over_from_apache_and_back(
    sessions: Sessions, tmp_path: Path, version: str
) -> None:
    java = sessions(version)
    slave = {**BROKER, "brokerRole": "SLAVE", "brokerId": 1}
    theirs = {"version": version}
    with (
        apache.NameServer(tmp_path / "names", version=version) as names,
        apache.Broker(
            tmp_path / "old", tmp_path / "store-1", names.address, **theirs, **BROKER
        ) as old,
    ):
        clients = Clients(java, names.address)
        clients.send("before", 20)
        clients.consume(names.address)
        clients.await_all()
        with penstock.Broker(
            tmp_path / "new",
            tmp_path / "store-2",
            names.address,
            **slave,
        ) as new:
            await_log(new, old)
            clients.send("following", 20)
            clients.send("delayed", 1, delay_level=3)
            clients.send_timer("timer", due_s=8)
            clients.send_half("half")
            pause_producers(old)
            assert eventually(lambda: log_end(new) == log_end(old))
            assert eventually(lambda: committed(new) == committed(old))
            old.kill()
            assert "is the master of moving (async_master)" in promote(names.address)
            clients.send("after", 20)
            clients.await_all()
            # Each once: the new master knows what the old one had delivered.
            assert not clients.repeated()

            with apache.Broker(
                tmp_path / "back", tmp_path / "store-3", names.address, **theirs, **slave
            ) as back:
                await_master(back)
                await_log(back, new)
                clients.send("back", 20)
                clients.await_all()
                pause_producers(new)
                await_log(back, new)
                copy_tables(back, new)
                back.stop()
            new.stop()
            with apache.Broker(
                tmp_path / "again", tmp_path / "store-3", names.address, **theirs, **BROKER
            ):
                clients.send("again", 20)
                clients.await_all()
                if WAIT_FOR_APACHE:
                    # Its timer, which has copied the progress of the master, ignores that.
                    assert set(clients.repeated()) <= {"timer"}
                clients.stop()
