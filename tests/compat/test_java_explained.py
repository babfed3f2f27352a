"""Real Java consumers, explained: on our broker and on Apache's."""

from __future__ import annotations

import pytest

from penstock import Admin
from penstock.client.diagnosis import FactKind, FactStatus, GroupVerdict, Verdict

from .clusters import Cluster, OwnCluster
from .java_session import JavaSession, eventually

pytestmark = [pytest.mark.compat, pytest.mark.slow]


def test_a_java_group_is_explained_on_our_broker(
    cluster: Cluster, java54: JavaSession, fresh: str
) -> None:
    explain(cluster, java54, fresh, redelivered=False)


def test_a_java_group_is_explained_on_apaches_broker(
    apache_cluster: OwnCluster, java54: JavaSession, fresh: str
) -> None:
    explain(apache_cluster, java54, fresh, redelivered=True)


def explain(server: Cluster, java54: JavaSession, fresh: str, *, redelivered: bool) -> None:
    java54.do("producer.start", producer="explained", namesrv=server.namesrv)
    messages = [{"topic": fresh, "body": tag, "tags": tag} for tag in ("good", "other")]
    sent = java54.do("producer.send", producer="explained", messages=messages)
    good, other = (line["msg_id"] for line in sent)
    java54.do(
        "push.start",
        consumer=fresh,
        namesrv=server.namesrv,
        group=fresh,
        topics={fresh: "good"},
        fail_times=1,
    )
    client_id = java54.do("push.client_id", consumer=fresh)
    with Admin(server.namesrv) as admin:

        def verdict(message_id: str) -> Verdict:
            return admin.explain_message(message_id, fresh, fresh).verdict

        java54.do("push.received", consumer=fresh, count=1)
        eventually(lambda: verdict(good) is Verdict.RETRYING)
        found = admin.explain_message(good, fresh, fresh)
        facts = {fact.kind: fact for fact in found.facts}
        assert facts[FactKind.OWNER].evidence == {"client_id": client_id}
        assert facts[FactKind.SUBSCRIPTION].status is FactStatus.OK
        assert facts[FactKind.RETRY].evidence["attempt"] == 1
        assert "Redelivery 1 is due in " in found.text
        eventually(lambda: verdict(other) is Verdict.FILTERED)
        if redelivered:  # after 10 s
            java54.do("push.received", consumer=fresh, count=2)
            eventually(lambda: verdict(good) is Verdict.CONSUMED)
            eventually(lambda: admin.explain_group(fresh).verdict is GroupVerdict.HEALTHY)
        java54.do("push.stop", consumer=fresh)
        eventually(lambda: admin.explain_group(fresh).verdict is GroupVerdict.NO_MEMBER)
