"""Real Java clients over TLS, and with the right, a wrong and no signature."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.wire.codes import RequestCode, ResponseCode
from tests.depth import rounds
from tests.integration.certificates import Pair, make_pair

from . import apache, clusters, maven
from .clusters import Cluster
from .java_session import ClientError, JavaSession, eventually
from .variants import each_release

pytestmark = [pytest.mark.compat, pytest.mark.slow, pytest.mark.usefixtures("java")]

REFUSED = int(ResponseCode.NO_PERMISSION)
NOT_SUPPORTED = int(ResponseCode.REQUEST_CODE_NOT_SUPPORTED)
TLS = [
    ("permissive", maven.V5_4),
    ("enforcing", maven.V4_9),
    ("permissive", maven.V4_9),
    ("enforcing", maven.V5_4),
    ("enforcing", maven.V5_5),
]
ROOT = {"user": "root", "password": "root-secret"}
ALICE = {"user": "alice", "password": "alice-secret-密码"}
WRONG = {"user": "alice", "password": "not-her-secret"}
UNKNOWN = {"user": "mallory", "password": "secret"}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("pair"), "penstock")


def _exchange(jvm: JavaSession, namesrv: str, topic: str, *, tls: bool) -> None:
    topic = name = f"{topic}-{'tls' if tls else 'plain'}"
    jvm.do("producer.start", producer=name, namesrv=namesrv, tls=tls, timeout_ms=4000)
    messages = [{"topic": topic, "size": size} for size in (10, 300_000, 2_000_000)]
    acked = jvm.do("producer.send", producer=name, messages=messages)
    assert {line.get("status") for line in acked} == {"SEND_OK"}, acked
    jvm.do("push.start", consumer=name, namesrv=namesrv, tls=tls, group=name, topics={topic: "*"})
    rows = jvm.do("push.received", consumer=name, count=3)
    assert sorted(row[7] for row in rows) == [10, 300_000, 2_000_000]


@pytest.mark.skipif(clusters.APACHE, reason="Apache takes its TLS settings from elsewhere")
@pytest.mark.parametrize(("mode", "version"), TLS[: rounds(ci=2, proof=5)])
def test_tls(
    tmp_path: Path,
    start_java: Callable[..., JavaSession],
    pair: Pair,
    fresh: str,
    mode: str,
    version: str,
) -> None:
    """The client checks the server's certificate; plain clients are served where allowed."""
    conf = {
        "tls.server.mode": mode,
        "tls.server.certPath": pair.certificate,
        "tls.server.keyPath": pair.key,
    }
    trust = {
        "tls.test.mode.enable": "false",
        "tls.client.authServer": "true",
        "tls.client.trustCertPath": str(pair.certificate),
    }
    jvm = start_java(version, properties=trust)
    outgoing = {"tls.enable": True, "tls.client.trustCertPath": pair.certificate}
    with (
        clusters.name_server(tmp_path / "namesrv", **conf) as names,
        clusters.broker(tmp_path / "broker", names.address, **conf, **outgoing),
    ):
        _exchange(jvm, names.address, fresh, tls=True)
        if mode == "permissive":
            _exchange(jvm, names.address, fresh, tls=False)
        else:
            jvm.do("producer.start", producer="plain", namesrv=names.address, timeout_ms=2000)
            message = {"topic": fresh, "body": "x"}
            [line] = jvm.do("producer.send", producer="plain", messages=[message])
            assert "error" in line
        # While it lives it delays the end of its connections, by TLS's good-bye.
        jvm.kill()


@pytest.fixture(scope="session")
def guarded(
    java: None, java54: JavaSession, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """A cluster with access control, in which Alice may use the topics and groups `alice-*`."""
    root = tmp_path_factory.mktemp("guarded")
    conf = {**apache.access_control(*ROOT.values()), "authConfigPath": root / "broker" / "auth"}
    with (
        clusters.name_server(root / "namesrv") as names,
        clusters.broker(root / "broker", names.address, **conf) as broker,
    ):
        java54.do("admin.start", admin="root", namesrv=names.address, **ROOT)
        call(java54, "root", "createUser", broker.address, *ALICE.values(), "Normal")
        call(
            java54, "root", "createAcl", broker.address, "User:alice",
            ["Topic:alice-*", "Group:alice-*"], ["Pub", "Sub"], [], "Allow",
        )  # fmt: skip
        call(java54, "root", "createAndUpdateTopicConfig", broker.address, {
            "topicName": "alice-orders", "readQueueNums": 4, "writeQueueNums": 4, "perm": 6,
        })  # fmt: skip
        yield Cluster(names.address, broker.name, broker.address)


def call(jvm: JavaSession, admin: str, method: str, *args: Any) -> Any:
    return jvm.do("admin.call", admin=admin, method=method, args=list(args))


def _send_as(jvm: JavaSession, cluster: Cluster, who: dict[str, str], topic: str) -> Any:
    name = f"as-{who.get('user', 'nobody')}-{len(who.get('password', ''))}"
    jvm.do("producer.start", producer=name, namesrv=cluster.namesrv, retries=0, **who)
    [line] = jvm.do("producer.send", producer=name, messages=[{"topic": topic, "body": "x"}])
    return line


@each_release
def test_rights_decide_who_may_send(client: JavaSession, guarded: Cluster) -> None:
    assert _send_as(client, guarded, ALICE, "alice-orders")["status"] == "SEND_OK"
    assert _send_as(client, guarded, ROOT, "alice-orders")["status"] == "SEND_OK"
    for who in (WRONG, UNKNOWN, {}):
        line = _send_as(client, guarded, who, "alice-orders")
        assert (line.get("code"), line.get("status")) == (REFUSED, None), who
    line = _send_as(client, guarded, ALICE, "TBW102")
    assert line.get("status") is None


@each_release
def test_rights_decide_who_may_consume(client: JavaSession, guarded: Cluster, fresh: str) -> None:
    group = f"alice-{fresh}"
    sent = _send_as(client, guarded, ALICE, "alice-orders")
    client.do(
        "push.start", consumer=group, namesrv=guarded.namesrv, group=group,
        topics={"alice-orders": "*"}, **ALICE,
    )  # fmt: skip

    def has_come() -> bool:
        rows = client.do("push.received", consumer=group)
        return sent["msg_id"] in {row[6] for row in rows}

    assert eventually(has_come)
    client.do("push.stop", consumer=group, later_ms=0)
    place = {"topic": "alice-orders", "broker": guarded.broker, "queue_id": 0}
    for number, (who, name) in enumerate(((WRONG, group), ({}, group), (ALICE, "bob-group"))):
        consumer = f"refused-{fresh}-{number}"
        client.do("pull.start", consumer=consumer, namesrv=guarded.namesrv, group=name, **who)
        with pytest.raises(ClientError) as refused:
            client.do("pull.messages", consumer=consumer, **place)
        assert refused.value.code == REFUSED
        client.do("pull.stop", consumer=consumer, later_ms=0)


def test_only_root_administers(java54: JavaSession, guarded: Cluster, fresh: str) -> None:
    config = {"topicName": fresh, "readQueueNums": 1, "writeQueueNums": 1, "perm": 6}
    calls: dict[str, tuple[Any, ...]] = {
        "createAndUpdateTopicConfig": (config,),
        "createUser": ("eve", "secret", "Super"),
    }
    if not clusters.APACHE:  # which lets every known user do this
        calls["updateBrokerConfig"] = ({"maxMessageSize": "1"},)
    for number, who in enumerate((ALICE, WRONG, {})):
        admin = f"{fresh}-{number}"
        java54.do("admin.start", admin=admin, namesrv=guarded.namesrv, **who)
        for method, arguments in calls.items():
            with pytest.raises(ClientError) as refused:
                call(java54, admin, method, guarded.broker_address, *arguments)
            assert refused.value.code == REFUSED, (who, method)
        java54.do("admin.stop", admin=admin, later_ms=0)


def test_no_request_is_served_unsigned(guarded: Cluster) -> None:
    answers = {
        code: apache.request(guarded.broker_address, int(code), {"topic": "alice-orders"})
        for code in RequestCode
    }
    served = {code.name: answer for code, answer in answers.items()
              if answer not in (REFUSED, NOT_SUPPORTED)}  # fmt: skip
    assert served == {}
    for code in (RequestCode.SEND_MESSAGE, RequestCode.SEND_MESSAGE_V2, RequestCode.PULL_MESSAGE,
                 RequestCode.HEART_BEAT, RequestCode.UPDATE_BROKER_CONFIG):  # fmt: skip
        assert answers[code] == REFUSED
