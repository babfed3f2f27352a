"""Source and sink over servers that require TLS and signed requests."""

from __future__ import annotations

import json
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import PySparkException

from penstock import Admin
from penstock.cli.main import main
from tests.compat.penstock import Broker, NameServer
from tests.integration.certificates import Pair, make_pair

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(180)]

ROOT, ROOT_SECRET = "root", "root-5ecret"
USER, SECRET = "spark", "sp4rk-5ecret"
WRONG = "wr0ng-5ecret"
SECRETS = (ROOT_SECRET, SECRET, WRONG)
ROWS = 200
RIGHTS = {
    "Topic:in-*": "Pub,Sub,Get",
    "Topic:out-*": "Pub",
    "Group:penstock-spark-source": "Sub",
    "Group:progress-*": "Sub,Create",
    "Topic:PENSTOCK_SINK_CONTROL": "Pub,Sub,Get,Create",
    "Group:CID_RMQ_SYS_PENSTOCK_SINK_*": "Sub",
    "Cluster:DefaultCluster": "Get",
}
"""What docs/spark.md says that a user needs, and no more."""
LONG = "1h"
"""Longer than any test may take: a read or write that is retried does not end in time."""


class SecuredCluster:
    """A NameServer and a broker that require TLS; the broker requires signatures, too."""

    def __init__(self, path: Path) -> None:
        self.pair = make_pair(path / "own", "penstock")
        self.names = NameServer(path / "names", **_tls(self.pair))
        self.broker = self.another(path / "broker", self.pair, brokerName="first")

    def another(self, path: Path, pair: Pair, **conf: Any) -> Broker:
        """A broker with its own certificate."""
        access: dict[str, Any] = {
            "authenticationEnabled": True,
            "authorizationEnabled": True,
            "initAuthenticationUser": json.dumps({"username": ROOT, "password": ROOT_SECRET}),
            "authConfigPath": path / "auth",
            "tls.enable": True,
            "tls.client.trustCertPath": self.pair.certificate,
        }
        return Broker(path, path / "store", self.names.address, **_tls(pair), **access, **conf)

    def run(self, *words: str) -> None:
        """Run an admin command."""
        at = ("-b", self.broker.address, "--tls", "--tls-ca", str(self.pair.certificate))
        assert main([*words, *at, "--access-key", ROOT, "--secret-key", ROOT_SECRET]) == 0

    def admin(self, trusted: Path | None = None) -> Admin:
        context = ssl.create_default_context(cafile=str(trusted or self.pair.certificate))
        return Admin(self.names.address, access_key=ROOT, secret_key=ROOT_SECRET, ssl=context)

    def options(self, **others: object) -> dict[str, str]:
        """The options of Spark's source and sink, for a user with few rights."""
        given = {
            "nameserver": self.names.address, "tls": "true", "tlsCa": self.pair.certificate,
            "accessKey": USER, "secretKey": SECRET, **others,
        }  # fmt: skip
        return {name: str(value) for name, value in given.items()}


def _tls(pair: Pair) -> dict[str, Any]:
    return {
        "tls.server.mode": "enforcing",
        "tls.server.certPath": pair.certificate,
        "tls.server.keyPath": pair.key,
    }


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredCluster]:
    secured = SecuredCluster(tmp_path_factory.mktemp("safe"))
    with secured.names, secured.broker:
        secured.run("user", "create", USER, "--password", SECRET)
        for resource, actions in RIGHTS.items():
            secured.run("acl", "grant", USER, resource, actions)
        yield secured


@pytest.fixture(scope="module")
def other_authority(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A certificate authority that did not sign the servers' certificates."""
    return make_pair(tmp_path_factory.mktemp("stranger"), "stranger")


def rows(spark: SparkSession) -> DataFrame:
    return spark.range(0, ROWS, 1, 2).selectExpr("CAST(id AS STRING) AS body")


def write(frame: DataFrame, **options: str) -> None:
    frame.write.format("penstock").mode("append").options(**options).save()


def test_a_user_with_minimal_rights_can_read_and_write(
    spark: SparkSession,
    secured: SecuredCluster,
    fresh: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source, sure, once = f"in-{fresh}", f"out-{fresh}-1", f"out-{fresh}-2"
    with secured.admin() as admin:
        for topic in (source, sure, once):
            admin.create_topic(topic, queues=2)

    write(rows(spark), **secured.options(topic=source))
    write(rows(spark), **secured.options(topic=once, delivery="transactional", sinkId=fresh))
    given = secured.options(subscribe=source)
    frame = spark.read.format("penstock").options(**given).load()
    assert sorted(int(row.body) for row in frame.collect()) == list(range(ROWS))

    stream = spark.readStream.format("penstock").options(**given, startingOffsets="earliest")
    stream = stream.option("commitGroup", f"progress-{fresh}")
    log = ""
    for topic, delivery in ((sure, "at-least-once"), (once, "transactional")):
        writer = stream.load().select("body").writeStream.format("penstock")
        writer = writer.options(**secured.options(topic=topic, delivery=delivery))
        writer = writer.option("checkpointLocation", str(tmp_path / delivery))
        query = writer.trigger(availableNow=True).start()
        assert query.awaitTermination(90)
        log += "".join(report.json for report in query.recentProgress)
        query.explain(extended=True)
    with secured.admin() as admin:
        stored = {
            topic: sum(queue.count for queue in admin.describe_topic(topic).queues)
            for topic in (source, sure, once)
        }
        progress = admin.progress(f"progress-{fresh}")
    assert sum(queue.committed or 0 for queue in progress.queues) == ROWS
    assert stored == {source: ROWS, sure: ROWS, once: 2 * ROWS}

    frame.explain(extended=True)
    view = ", ".join(f"{name} '{value}'" for name, value in given.items())
    spark.sql(f"EXPLAIN EXTENDED CREATE TEMPORARY VIEW v USING penstock OPTIONS ({view})").show(
        truncate=False
    )
    log += capsys.readouterr().out
    assert log.count(source) > 2
    assert "BatchScan penstock" in log
    assert "secretKey -> *********(redacted)" in log
    assert not [secret for secret in SECRETS if secret in log]


def read(spark: SparkSession, topic: str, options: dict[str, str]) -> None:
    frame = spark.read.format("penstock").options(**options, subscribe=topic, readTimeout=LONG)
    frame.load().count()


def follow(spark: SparkSession, topic: str, options: dict[str, str]) -> None:
    stream = spark.readStream.format("penstock").options(**options, subscribe=topic)
    query = stream.option("readTimeout", LONG).load().writeStream.format("noop").start()
    try:
        query.awaitTermination()
    finally:
        query.stop()


def send(spark: SparkSession, topic: str, options: dict[str, str]) -> None:
    write(rows(spark), **options, topic=topic, deliveryTimeout=LONG)


def send_once(spark: SparkSession, topic: str, options: dict[str, str]) -> None:
    once = {"delivery": "transactional", "sinkId": topic, "deliveryTimeout": LONG}
    write(rows(spark), **options, **once, topic=topic)


Way = Callable[["SparkSession", str, dict[str, str]], None]
WAYS = pytest.mark.parametrize("way", [read, follow, send, send_once])


@WAYS
def test_a_wrong_secret_is_reported(
    spark: SparkSession, secured: SecuredCluster, fresh: str, way: Way
) -> None:
    topic = f"in-{fresh}"
    with secured.admin() as admin:
        admin.create_topic(topic, queues=1)
    with pytest.raises(PySparkException) as failure:
        way(spark, topic, secured.options(secretKey=WRONG))
    text = str(failure.value)
    assert f"{secured.broker.address}: User:{USER} may not" in text
    assert "unknown user or wrong signature" in text
    assert not [secret for secret in SECRETS if secret in text]


@WAYS
def test_an_untrusted_server_is_reported(
    spark: SparkSession, secured: SecuredCluster, other_authority: Pair, fresh: str, way: Way
) -> None:
    with pytest.raises(PySparkException) as failure:
        way(spark, f"in-{fresh}", secured.options(tlsCa=other_authority.certificate))
    text = str(failure.value)
    assert secured.names.address in text
    assert "self-signed certificate" in text
    assert "tlsCa" in text
    assert not [secret for secret in SECRETS if secret in text]


def test_plans_and_tasks_report_an_untrusted_broker(
    spark: SparkSession, secured: SecuredCluster, other_authority: Pair, fresh: str, tmp_path: Path
) -> None:
    topic, trusted = f"in-{fresh}", tmp_path / "trusted.pem"
    ours, others = secured.pair.certificate.read_text(), other_authority.certificate.read_text()
    access = secured.options(tlsCa=trusted, accessKey=ROOT, secretKey=ROOT_SECRET)
    read = spark.read.format("penstock").options(**access, subscribe=topic, readTimeout=LONG)
    with secured.another(tmp_path / "broker", other_authority, brokerName="second") as broker:
        trusted.write_text(ours + others)
        with secured.admin(trusted) as admin:
            admin.create_topic(topic, queues=1, brokers=[broker.name])
        write(rows(spark), **access, topic=topic)
        planned = read.load().rdd
        assert planned.getNumPartitions() == 1  # plans the read
        trusted.write_text(ours)
        log = f"TlsError: {broker.address}: the server's certificate is not trusted: self-signed"
        with pytest.raises(PySparkException, match=log):
            read.load().count()
        with pytest.raises(Exception, match=log):
            planned.collect()
