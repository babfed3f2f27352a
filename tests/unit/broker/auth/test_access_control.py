"""Whether a request is served: signature, user, rules; refusals and the audit."""

from __future__ import annotations

import logging

import pytest

from penstock.broker.auth.access_control import REMEMBERED_MAX, Access, Credentials
from penstock.broker.auth.users import AccessTable
from penstock.config import AccessConfig, BrokerConfig, Live, Settings
from penstock.rpc.answers import EffectQueue, PersistSoon
from penstock.wire.codes import RequestCode, ResponseCode

from .access_kit import ON, PEER, House, command, rule

SEND = RequestCode.SEND_MESSAGE_V2
PULL = RequestCode.PULL_MESSAGE
NO = ResponseCode.NO_PERMISSION


@pytest.fixture
def house() -> House:
    house = House()
    house.add("root", type="Super")
    house.add("ann", rule("Topic:t", "Pub"), rule("Group:g", "Sub"))
    house.add("bob")
    return house


def test_nothing_is_checked_while_access_control_is_off() -> None:
    house = House(AccessConfig())
    assert not house.access.enabled()
    assert house.check("", RequestCode.UPDATE_BROKER_CONFIG) is None


def test_a_rule_opens_what_it_is_about(house: House) -> None:
    assert house.allows("ann", SEND, {"b": "t"})
    assert not house.allows("ann", SEND, {"b": "u"})
    assert not house.allows("bob", SEND, {"b": "t"})
    assert house.allows("root", SEND, {"b": "u"})


def test_every_need_must_be_met(house: House) -> None:
    assert not house.allows("ann", PULL, {"topic": "t", "consumerGroup": "g"})
    house.add("ann", rule("Topic:t", "Pub,Sub"), rule("Group:g", "Sub"))
    assert house.allows("ann", PULL, {"topic": "t", "consumerGroup": "g"})


def test_a_topic_that_only_the_handling_shows_is_checked_too(house: House) -> None:
    house.add("ann", rule("Topic:t", "Sub"), rule("Group:g", "Sub"))
    hand_back = {name: command(name, 36, {"group": "g"}) for name in ("ann", "bob", "root")}
    assert house.access.check_read(hand_back["ann"], "t") is None
    assert house.access.check_read(hand_back["ann"], "%RETRY%g") is None
    assert house.access.check_read(hand_back["root"], "u") is None
    for name, topic in (("ann", "u"), ("ann", "%RETRY%h"), ("bob", "t")):
        refusal = house.access.check_read(hand_back[name], topic)
        assert refusal is not None
        assert refusal.code == NO
    assert House(AccessConfig()).access.check_read(command("", 36), "u") is None


def test_a_refusal_names_subject_action_resource_and_source(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "penstock.audit"):
        reply = house.check("ann", SEND, {"b": "u"})
    assert reply is not None
    assert reply.code == NO
    assert reply.remark is not None
    assert "User:ann may not Pub Topic:u from 192.0.2.7" in reply.remark
    assert [record.getMessage() for record in caplog.records] == [
        "refused subject=User:ann action=Pub resource=Topic:u source=192.0.2.7 "
        "request=SEND_MESSAGE_V2 why=no rule allows it"
    ]


def test_a_refusal_names_the_rule_that_denies(house: House) -> None:
    house.add("ann", rule("Topic:t*", "All", "Deny"), rule("*", "All"))
    reply = house.check("ann", SEND, {"b": "t1"})
    assert reply is not None
    assert "the rule for Topic:t* denies it" in (reply.remark or "")


def test_unsigned_requests_are_nobodys(house: House) -> None:
    reply = house.check("", SEND, {"b": "t"})
    assert reply is not None
    assert reply.code == NO
    assert "nobody may not Pub Topic:t" in (reply.remark or "")
    assert "not signed" in (reply.remark or "")


def test_strangers_and_wrong_keys_are_told_the_same(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    forged = command("ann", SEND, {"b": "t"})
    forged.ext["b"] = "u"
    replies = [house.access.check(forged), house.check("zoe", SEND, {"b": "u"})]
    remarks = [(reply.remark or "") for reply in replies if reply]
    assert len(remarks) == 2
    assert remarks[0] == remarks[1].replace("zoe", "ann")
    whys = [record.getMessage().partition("why=")[2] for record in caplog.records]
    assert whys == ["wrong signature", "unknown user"]


def test_nobody_gets_in_with_an_empty_key(house: House) -> None:
    from penstock.rpc.command import Command
    from penstock.wire.signing import signed

    for name in ("", "zoe", "ann"):
        ext = signed({"b": "t"}, b"", access_key=name, secret_key="")
        assert house.access.check(Command(SEND, ext, peer=PEER)) is not None


def test_a_disabled_user_is_refused_super_or_not(house: House) -> None:
    house.add("old", type="Super", status="disable")
    reply = house.check("old", SEND, {"b": "t"})
    assert reply is not None
    assert "disabled" in (reply.remark or "")


def test_rules_about_addresses_ask_the_connection(house: House) -> None:
    house.add("ann", rule("Topic:t", "Pub", "Allow", "192.0.2.0/24"))
    assert house.check("ann", SEND, {"b": "t"}, peer="192.0.2.200:1") is None
    assert house.check("ann", SEND, {"b": "t"}, peer="198.51.100.1:1") is not None
    assert house.check("ann", SEND, {"b": "t"}, peer="") is not None


def test_what_was_allowed_is_forgotten_when_the_table_changes(house: House) -> None:
    assert house.allows("ann", SEND, {"b": "t"})
    assert house.allows("ann", SEND, {"b": "t"})
    house.add("ann", rule("Topic:t", "Pub", "Deny"))
    assert not house.allows("ann", SEND, {"b": "t"})
    house.add("ann", rule("Topic:t", "Pub"))
    assert house.allows("ann", SEND, {"b": "t"})
    house.table.remove_user("ann", 9)
    assert not house.allows("ann", SEND, {"b": "t"})


def test_what_is_remembered_has_a_limit(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    assert REMEMBERED_MAX >= 10_000
    monkeypatch.setattr("penstock.broker.auth.access_control.REMEMBERED_MAX", 8)
    house.add("ann", rule("Topic:*", "Pub"))
    for number in range(100):
        assert house.allows("ann", SEND, {"b": f"t{number}"})
        assert len(house.access._allowed) <= 9


def test_authentication_alone_asks_no_rules() -> None:
    house = House(AccessConfig(authentication=True))
    house.add("bob")
    assert house.allows("bob", RequestCode.UPDATE_BROKER_CONFIG, {})
    assert not house.allows("zoe", RequestCode.UPDATE_BROKER_CONFIG, {})


def test_authorization_alone_still_asks_for_signatures() -> None:
    house = House(AccessConfig(authorization=True))
    house.add("ann", rule("*", "All"))
    assert house.allows("ann", SEND, {"b": "t"})
    assert not house.allows("zoe", SEND, {"b": "t"})


@pytest.mark.parametrize("code", [*RequestCode, 99_999])
def test_every_code_is_refused_without_rights(house: House, code: int) -> None:
    for name, body in (("bob", {}), ("bob", None), ("", None), ("zoe", {})):
        reply = house.check(name, code, {}, body)
        assert reply is not None
        assert reply.code == NO
    assert house.check("root", code, {}) is None


def test_a_body_that_cant_be_read_is_refused(house: House) -> None:
    broken = command("ann", RequestCode.HEART_BEAT, {}, "no object")
    reply = house.access.check(broken)
    assert reply is not None
    assert reply.code == NO


def test_what_administrators_change_is_noted(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    house.add("ops", rule("Topic:t*", "Create,Delete,Get"))
    with caplog.at_level(logging.INFO, "penstock.audit"):
        assert house.allows("ops", RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": "t1"})
        assert house.allows("root", RequestCode.UPDATE_BROKER_CONFIG, {})
        assert house.allows("ops", RequestCode.GET_MAX_OFFSET, {"topic": "t1"})
        assert house.allows("root", SEND, {"b": "t"})
    assert [record.getMessage() for record in caplog.records] == [
        "allowed subject=User:ops action=Delete resource=Topic:t1 source=192.0.2.7 "
        "request=DELETE_TOPIC_IN_BROKER",
        "allowed subject=User:root action=Update resource=Cluster:DefaultCluster "
        "source=192.0.2.7 request=UPDATE_BROKER_CONFIG",
    ]


def test_names_from_clients_cant_forge_lines_of_the_log(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    house.check("bob", SEND, {"b": "t\nallowed subject=User:bob" + "x" * 500})
    line = caplog.records[0].getMessage()
    assert "\n" not in line
    assert len(line) < 400


def test_the_users_of_the_settings_are_made_once(caplog: pytest.LogCaptureFixture) -> None:
    config = AccessConfig(
        authentication=True, initial_user="root:first:pass", internal_user="inner:second"
    )
    effects, table = EffectQueue(), AccessTable()
    live = Live(Settings(access=config, broker=BrokerConfig(cluster="c9")))
    access = Access(live, table, effects)
    access.seed(7)
    assert table.users["root"].password == "first:pass"
    assert table.users["root"].is_super
    assert table.users["inner"].is_super
    assert access.internal() == Credentials("inner", "second")
    assert effects.take() == [PersistSoon(table), PersistSoon(table)]
    access.seed(8)
    assert effects.take() == []
    assert not caplog.records


def test_a_server_nobody_can_administer_says_so(caplog: pytest.LogCaptureFixture) -> None:
    access = Access(Live(Settings(access=ON)), AccessTable(), EffectQueue())
    access.seed(7)
    assert "access.initial_user" in caplog.text
    assert access.internal() is None
