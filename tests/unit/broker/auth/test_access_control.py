"""Access control: signatures, users, rules, refusals and the audit log."""

from __future__ import annotations

import logging

import pytest

from penstock.broker.auth.access_control import CACHE_MAX, AccessControl, Credentials
from penstock.broker.auth.users import AccessTable
from penstock.config import AccessConfig, BrokerConfig, LiveSettings, Settings
from penstock.rpc.answers import EffectQueue, PersistSoon
from penstock.rpc.command import Command
from penstock.wire.codes import RequestCode, ResponseCode
from penstock.wire.signing import strict_signer

from .access_kit import ON, PEER, AccessFixture, command, rule

SEND = RequestCode.SEND_MESSAGE_V2
PULL = RequestCode.PULL_MESSAGE
NO = ResponseCode.NO_PERMISSION


@pytest.fixture
def env() -> AccessFixture:
    env = AccessFixture()
    env.add("root", type="Super")
    env.add("ann", rule("Topic:t", "Pub"), rule("Group:g", "Sub"))
    env.add("bob")
    return env


def test_nothing_is_checked_while_access_control_is_off() -> None:
    env = AccessFixture(AccessConfig())
    assert not env.access.enabled()
    assert env.check("", RequestCode.UPDATE_BROKER_CONFIG) is None


def test_a_rule_allows_its_resource(env: AccessFixture) -> None:
    assert env.allows("ann", SEND, {"b": "t"})
    assert not env.allows("ann", SEND, {"b": "u"})
    assert not env.allows("bob", SEND, {"b": "t"})
    assert env.allows("root", SEND, {"b": "u"})


def test_every_required_right_is_checked(env: AccessFixture) -> None:
    assert not env.allows("ann", PULL, {"topic": "t", "consumerGroup": "g"})
    env.add("ann", rule("Topic:t", "Pub,Sub"), rule("Group:g", "Sub"))
    assert env.allows("ann", PULL, {"topic": "t", "consumerGroup": "g"})


def test_a_topic_found_by_the_handler_is_checked(env: AccessFixture) -> None:
    env.add("ann", rule("Topic:t", "Sub"), rule("Group:g", "Sub"))
    hand_back = {name: command(name, 36, {"group": "g"}) for name in ("ann", "bob", "root")}
    for one in hand_back.values():
        env.access.check(one)
    assert env.access.check_read(hand_back["ann"], "t") is None
    assert env.access.check_read(hand_back["ann"], "%RETRY%g") is None
    assert env.access.check_read(hand_back["root"], "u") is None
    for name, topic in (("ann", "u"), ("ann", "%RETRY%h"), ("bob", "t")):
        refusal = env.access.check_read(hand_back[name], topic)
        assert refusal is not None
        assert refusal.code == NO
    assert AccessFixture(AccessConfig()).access.check_read(command("", 36), "u") is None


def test_a_refusal_names_subject_action_resource_and_source(
    env: AccessFixture, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "penstock.audit"):
        reply = env.check("ann", SEND, {"b": "u"})
    assert reply is not None
    assert reply.code == NO
    assert reply.remark is not None
    assert "User:ann may not Pub Topic:u from 192.0.2.7" in reply.remark
    assert [record.getMessage() for record in caplog.records] == [
        "refused subject=User:ann action=Pub resource=Topic:u source=192.0.2.7 "
        "request=SEND_MESSAGE_V2 why=no rule allows it"
    ]


def test_a_refusal_names_the_rule_that_denies(env: AccessFixture) -> None:
    env.add("ann", rule("Topic:t*", "All", "Deny"), rule("*", "All"))
    reply = env.check("ann", SEND, {"b": "t1"})
    assert reply is not None
    assert "the rule for Topic:t* denies it" in (reply.remark or "")


def test_unsigned_requests_are_refused(env: AccessFixture) -> None:
    reply = env.check("", SEND, {"b": "t"})
    assert reply is not None
    assert reply.code == NO
    assert "an anonymous user may not Pub Topic:t" in (reply.remark or "")
    assert "not signed" in (reply.remark or "")


def test_unknown_users_and_wrong_keys_get_the_same_refusal(
    env: AccessFixture, caplog: pytest.LogCaptureFixture
) -> None:
    forged = command("ann", SEND, {"b": "t"})
    forged.ext["b"] = "u"
    replies = [env.access.check(forged), env.check("zoe", SEND, {"b": "u"})]
    remarks = [(reply.remark or "") for reply in replies if reply]
    assert len(remarks) == 2
    assert remarks[0] == remarks[1].replace("zoe", "ann")
    whys = [record.getMessage().partition("why=")[2] for record in caplog.records]
    assert whys == ["wrong signature", "unknown user"]


def test_an_empty_key_is_refused(env: AccessFixture) -> None:
    from penstock.rpc.command import Command
    from penstock.wire.signing import signed

    for name in ("", "zoe", "ann"):
        ext = signed({"b": "t"}, b"", access_key=name, secret_key="")
        assert env.access.check(Command(SEND, ext, peer=PEER)) is not None


def test_a_disabled_user_is_refused(env: AccessFixture) -> None:
    env.add("old", type="Super", status="disable")
    reply = env.check("old", SEND, {"b": "t"})
    assert reply is not None
    assert "disabled" in (reply.remark or "")


def test_rules_with_addresses_use_that_of_the_connection(env: AccessFixture) -> None:
    env.add("ann", rule("Topic:t", "Pub", "Allow", "192.0.2.0/24"))
    assert env.check("ann", SEND, {"b": "t"}, peer="192.0.2.200:1") is None
    assert env.check("ann", SEND, {"b": "t"}, peer="198.51.100.1:1") is not None
    assert env.check("ann", SEND, {"b": "t"}, peer="") is not None


def test_a_change_of_the_table_clears_the_cache(env: AccessFixture) -> None:
    assert env.allows("ann", SEND, {"b": "t"})
    assert env.allows("ann", SEND, {"b": "t"})
    env.add("ann", rule("Topic:t", "Pub", "Deny"))
    assert not env.allows("ann", SEND, {"b": "t"})
    env.add("ann", rule("Topic:t", "Pub"))
    assert env.allows("ann", SEND, {"b": "t"})
    env.table.remove_user("ann", 9)
    assert not env.allows("ann", SEND, {"b": "t"})


def test_the_cache_has_a_limit(env: AccessFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    assert CACHE_MAX >= 10_000
    monkeypatch.setattr("penstock.broker.auth.access_control.CACHE_MAX", 8)
    env.add("ann", rule("Topic:*", "Pub"))
    for number in range(100):
        assert env.allows("ann", SEND, {"b": f"t{number}"})
        assert len(env.access._allowed) <= 9


def test_authentication_alone_checks_no_rules() -> None:
    env = AccessFixture(AccessConfig(authentication=True))
    env.add("bob")
    assert env.allows("bob", RequestCode.UPDATE_BROKER_CONFIG, {})
    assert not env.allows("zoe", RequestCode.UPDATE_BROKER_CONFIG, {})


def test_authorization_alone_requires_signatures() -> None:
    env = AccessFixture(AccessConfig(authorization=True))
    env.add("ann", rule("*", "All"))
    assert env.allows("ann", SEND, {"b": "t"})
    assert not env.allows("zoe", SEND, {"b": "t"})


@pytest.mark.parametrize("code", [*RequestCode, 99_999])
def test_every_code_is_refused_without_rights(env: AccessFixture, code: int) -> None:
    for name, body in (("bob", {}), ("bob", None), ("", None), ("zoe", {})):
        reply = env.check(name, code, {}, body)
        assert reply is not None
        assert reply.code == NO
    assert env.check("root", code, {}) is None


def test_an_invalid_body_is_refused(env: AccessFixture) -> None:
    broken = command("ann", RequestCode.HEART_BEAT, {}, "no object")
    reply = env.access.check(broken)
    assert reply is not None
    assert reply.code == NO


def test_changes_by_administrators_are_logged(
    env: AccessFixture, caplog: pytest.LogCaptureFixture
) -> None:
    env.add("ops", rule("Topic:t*", "Create,Delete,Get"))
    with caplog.at_level(logging.INFO, "penstock.audit"):
        assert env.allows("ops", RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": "t1"})
        assert env.allows("root", RequestCode.UPDATE_BROKER_CONFIG, {})
        assert env.allows("ops", RequestCode.GET_MAX_OFFSET, {"topic": "t1"})
        assert env.allows("root", SEND, {"b": "t"})
    assert [record.getMessage() for record in caplog.records] == [
        "allowed subject=User:ops action=Delete resource=Topic:t1 source=192.0.2.7 "
        "request=DELETE_TOPIC_IN_BROKER",
        "allowed subject=User:root action=Update resource=Cluster:DefaultCluster "
        "source=192.0.2.7 request=UPDATE_BROKER_CONFIG",
    ]


def test_names_of_clients_can_not_forge_log_lines(
    env: AccessFixture, caplog: pytest.LogCaptureFixture
) -> None:
    env.check("bob", SEND, {"b": "t\nallowed subject=User:bob" + "x" * 500})
    line = caplog.records[0].getMessage()
    assert "\n" not in line
    assert len(line) < 400


def test_the_users_of_the_settings_are_created_once(caplog: pytest.LogCaptureFixture) -> None:
    config = AccessConfig(
        authentication=True, initial_user="root:first:pass", internal_user="inner:second"
    )
    effects, table = EffectQueue(), AccessTable()
    live = LiveSettings(Settings(access=config, broker=BrokerConfig(cluster="c9")))
    access = AccessControl(live, table, effects)
    access.seed(7)
    assert table.users["root"].password == "first:pass"
    assert table.users["root"].is_super
    assert table.users["inner"].is_super
    assert access.internal() == Credentials("inner", "second")
    assert effects.take() == [PersistSoon(table), PersistSoon(table)]
    access.seed(8)
    assert effects.take() == []
    assert not caplog.records


def test_a_server_without_a_super_user_logs_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    access = AccessControl(LiveSettings(Settings(access=ON)), AccessTable(), EffectQueue())
    access.seed(7)
    assert "access.initial_user" in caplog.text
    assert access.internal() is None


def strict_command(code: int, ext: dict[str, str], now_ms: int = 5) -> Command:
    fields = strict_signer("ann", "annann", lambda: 5)(code, ext, b"")
    return Command(code, fields, peer=PEER, now_ms=now_ms, version=493)


def test_strict_signatures_are_accepted_beside_those_of_rocketmq(env: AccessFixture) -> None:
    assert env.access.check(strict_command(SEND, {"b": "t"})) is None
    assert env.allows("ann", SEND, {"b": "t"})
    captured = strict_command(SEND, {"b": "t"})
    for code in (PULL, RequestCode.UPDATE_BROKER_CONFIG):
        refusal = env.access.check(Command(code, captured.ext, peer=PEER, now_ms=5, version=493))
        assert refusal is not None
        assert "wrong signature" in (refusal.remark or "")
    late = env.access.check(strict_command(SEND, {"b": "t"}, now_ms=400_000))
    assert late is not None
    assert "a clock differs by more than 300 s" in (late.remark or "")


def test_strict_signing_refuses_signatures_of_rocketmq() -> None:
    strict = AccessConfig(authentication=True, authorization=True, strict_signing=True)
    env = AccessFixture(strict)
    env.add("ann", rule("Topic:t", "Pub"))
    assert env.access.check(strict_command(SEND, {"b": "t"})) is None
    refusal = env.check("ann", SEND, {"b": "t"})
    assert refusal is not None
    assert "only strict signatures are accepted" in (refusal.remark or "")
