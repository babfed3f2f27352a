"""Administration of users and access lists, and their file.

The responses of Apache to the same requests are in tests/compat/test_access_rules.py."""

from __future__ import annotations

import json
import logging
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from penstock.broker.auth import users
from penstock.broker.auth.policies import PolicyType
from penstock.broker.auth.users import AccessTable, User
from penstock.config import AccessConfig
from penstock.errors import StoreDamaged
from penstock.rpc.answers import Reply
from penstock.rpc.persistence import Persistence
from penstock.store.disk import Disk
from penstock.wire import fastjson
from tests.unit.broker.auth.access_kit import AccessFixture, rule

CREATE_USER, UPDATE_USER, DELETE_USER, GET_USER, LIST_USER = range(3001, 3006)
CREATE_ACL, UPDATE_ACL, DELETE_ACL, GET_ACL, LIST_ACL = range(3006, 3011)
NO, INVALID = 16, 29


@pytest.fixture
def env() -> AccessFixture:
    env = AccessFixture()
    env.add("root", type="Super")
    env.add("ann")
    env.add("ops", rule("Cluster:*", "Get,Update"))
    return env


def entry(resource: str, actions: list[str], decision: str = "Allow") -> dict[str, Any]:
    return {"resource": resource, "actions": actions, "decision": decision}


def acl(user: str, *entries: dict[str, Any], kind: str | None = "Custom") -> dict[str, Any]:
    return {"subject": f"User:{user}", "policies": [{"policyType": kind, "entries": entries}]}


def body(reply: Reply) -> Any:
    assert reply.code == 0, reply.remark
    return json.loads(reply.body) if reply.body else None


def test_a_user_is_created_with_defaults_and_persisted(env: AccessFixture) -> None:
    reply = env.ask("root", CREATE_USER, {"username": "new"}, {"password": "p"})
    assert reply == Reply()
    assert env.saved == 1
    assert env.table.dirty
    assert body(env.ask("root", GET_USER, {"username": "new"})) == {
        "username": "new",
        "userType": "Normal",
        "userStatus": "enable",
    }


@pytest.mark.parametrize(
    ("ext", "info", "code", "part"),
    [
        ({}, {"password": "p"}, INVALID, "username is blank"),
        ({"username": "new"}, {}, NO, "no password"),
        ({"username": "new"}, {"password": " "}, NO, "no password"),
        ({"username": "ann"}, {"password": "p"}, NO, "already exists"),
        ({"username": "n" * 256}, {"password": "p"}, INVALID, "256 characters, the limit is 255"),
        ({"username": "new\nline"}, {"password": "p"}, INVALID, "can't be printed"),
        ({"username": "new"}, {"password": "p" * 1025}, INVALID, "1025 bytes, the limit is 1024"),
        ({"username": "new"}, {"password": "é" * 513}, INVALID, "1026 bytes, the limit is 1024"),
    ],
)
def test_an_invalid_user_is_refused(
    env: AccessFixture, ext: dict[str, str], info: dict[str, str], code: int, part: str
) -> None:
    reply = env.ask("root", CREATE_USER, ext, info)
    assert reply.code == code
    assert part in (reply.remark or "")
    assert env.saved == 0


def test_an_update_changes_only_given_fields(env: AccessFixture) -> None:
    assert env.ask("root", UPDATE_USER, {"username": "ann"}, {"userStatus": "Disable"}).code == 0
    user = env.table.users["ann"]
    assert (user.password, user.type, user.status) == ("annann", "Normal", "disable")
    assert env.ask("root", UPDATE_USER, {"username": "ann"}, {"password": "new"}).code == 0
    user = env.table.users["ann"]
    assert (user.password, user.secret, user.status) == ("new", b"new", "disable")
    assert env.ask("root", UPDATE_USER, {"username": "zoe"}, {"password": "x"}).code == NO
    long = env.ask("root", UPDATE_USER, {"username": "ann"}, {"password": "x" * 1025})
    assert long.code == INVALID
    assert env.table.users["ann"].password == "new"


def test_only_super_users_administer_super_users(env: AccessFixture) -> None:
    more = {"password": "p", "userType": "super"}
    assert env.ask("ops", CREATE_USER, {"username": "new"}, more).code == NO
    assert env.ask("ops", UPDATE_USER, {"username": "ann"}, {"userType": "Super"}).code == NO
    assert env.ask("ops", UPDATE_USER, {"username": "root"}, {"password": "x"}).code == NO
    assert env.ask("ops", DELETE_USER, {"username": "root"}).code == NO
    assert env.ask("", DELETE_USER, {"username": "root"}).code == NO
    assert env.ask("root", CREATE_USER, {"username": "new"}, more).code == 0
    assert env.table.users["new"].is_super


def test_nobody_sees_passwords(env: AccessFixture) -> None:
    for user in ("root", "ops"):
        for name in ("root", "ann"):
            answer = env.ask(user, GET_USER, {"username": name})
            assert name.encode() * 2 not in answer.body
            assert "password" not in body(answer)
        assert not any("password" in shown for shown in body(env.ask(user, LIST_USER)))
    assert "annann" not in repr(env.table.users["ann"])


def test_the_last_super_user_can_not_be_removed(env: AccessFixture) -> None:
    assert env.ask("root", DELETE_USER, {"username": "root"}).code == NO
    assert env.ask("root", UPDATE_USER, {"username": "root"}, {"userType": "Normal"}).code == NO
    assert env.ask("root", UPDATE_USER, {"username": "root"}, {"userStatus": "disable"}).code == NO
    assert env.ask("root", UPDATE_USER, {"username": "root"}, {"password": "new"}).code == 0
    env.add("root2", type="Super")
    assert env.ask("root", DELETE_USER, {"username": "root"}).code == 0


def test_without_access_control_every_client_may_administer_users() -> None:
    env = AccessFixture(AccessConfig())
    more = {"password": "p", "userType": "Super"}
    assert env.ask("", CREATE_USER, {"username": "root"}, more).code == 0
    assert env.ask("", DELETE_USER, {"username": "root"}).code == 0


def test_a_missing_user_is_not_an_error(env: AccessFixture) -> None:
    assert env.ask("root", GET_USER, {"username": "zoe"}) == Reply()
    assert env.ask("root", DELETE_USER, {"username": "zoe"}) == Reply()
    assert env.ask("root", LIST_USER, {"filter": "zoe"}) == Reply()
    assert env.saved == 0


def test_deleting_a_user_deletes_its_rules(env: AccessFixture) -> None:
    assert env.ask("root", DELETE_USER, {"username": "ops"}).code == 0
    assert "ops" not in env.table.rules


def test_rules_are_added_or_replace_those_for_the_same_resource(env: AccessFixture) -> None:
    first = acl("ann", entry("topic:t*", ["pub", "fly", "SUB"]), entry("Group:g", ["Sub"]))
    assert env.ask("root", CREATE_ACL, {"subject": "User:ann"}, first).code == 0
    second = acl("ann", entry("Topic:t*", ["Get"], "deny"), entry("Topic:u", ["All"]), kind=None)
    assert env.ask("root", UPDATE_ACL, {"subject": "User:ann"}, second).code == 0
    third = acl("ann", entry("*", ["List"]), kind="default")
    assert env.ask("root", UPDATE_ACL, {"subject": "User:ann"}, third).code == 0
    assert body(env.ask("root", GET_ACL, {"subject": "User:ann"})) == {
        "subject": "User:ann",
        "policies": [
            {
                "policyType": "Custom",
                "entries": [
                    {"resource": "Topic:t*", "actions": ["Get"], "decision": "Deny"},
                    {"resource": "Group:g", "actions": ["Sub"], "decision": "Allow"},
                    {"resource": "Topic:u", "actions": ["All"], "decision": "Allow"},
                ],
            },
            {
                "policyType": "Default",
                "entries": [{"resource": "*", "actions": ["List"], "decision": "Allow"}],
            },
        ],
    }


@pytest.mark.parametrize(
    ("wrong", "part"),
    [
        (acl("zoe", entry("*", ["All"])), "User:zoe does not exist"),
        (acl("ann", entry("Foo:t", ["All"])), "resource"),
        (acl("ann", entry("Topic:t", ["Fly"])), "actions"),
        (acl("ann", entry("Topic:t", [])), "actions"),
        (acl("ann", entry("Topic:t", ["Any"])), "actions"),
        (acl("ann", entry("Topic:t", ["Pub"], "Perhaps")), "decision"),
        (acl("ann", {**entry("Topic:t", ["Pub"]), "sourceIps": ["1.2.3.4/40"]}), "source ip"),
        (acl("ann"), "no policies"),
        ({"subject": "User:ann"}, "no policies"),
    ],
)
def test_an_invalid_access_list_is_refused(env: AccessFixture, wrong: Any, part: str) -> None:
    reply = env.ask("root", CREATE_ACL, {"subject": "User:ann"}, wrong)
    assert reply.code in (NO, INVALID)
    assert part in (reply.remark or "")
    assert "ann" not in env.table.rules


def test_rules_are_deleted_one_by_one_or_all(env: AccessFixture) -> None:
    rules = acl("ann", entry("Topic:t", ["Pub"]), entry("Group:g", ["Sub"]))
    env.ask("root", CREATE_ACL, {}, rules)
    subject = {"subject": "User:ann"}
    assert env.ask("root", DELETE_ACL, {**subject, "resource": "Topic:t"}).code == 0
    # A resource that can't be read deletes nothing, where Apache deletes all.
    assert env.ask("root", DELETE_ACL, {**subject, "resource": "Tropic:t"}).code == NO
    assert len(env.table.rules["ann"][PolicyType.CUSTOM]) == 1
    assert env.ask("root", DELETE_ACL, {**subject, "resource": "Group:g"}).code == 0
    assert "ann" not in env.table.rules
    assert env.ask("root", DELETE_ACL, subject).code == NO
    env.ask("root", CREATE_ACL, {}, rules)
    assert env.ask("root", DELETE_ACL, subject).code == 0
    assert "ann" not in env.table.rules


def test_lists_can_be_filtered(env: AccessFixture) -> None:
    env.ask(
        "root", CREATE_ACL, {}, acl("ann", entry("Topic:t", ["Pub"]), entry("Group:g", ["Sub"]))
    )
    found = body(env.ask("root", LIST_ACL))
    assert [one["subject"] for one in found] == ["User:ann", "User:ops"]
    found = body(env.ask("root", LIST_ACL, {"resourceFilter": "Topic"}))
    assert [one["resource"] for one in found[0]["policies"][0]["entries"]] == ["Topic:t"]
    assert len(found) == 1
    found = body(env.ask("root", LIST_ACL, {"subjectFilter": "op"}))
    assert [one["subject"] for one in found] == ["User:ops"]
    assert env.ask("root", LIST_ACL, {"subjectFilter": "zoe"}) == Reply()


def test_changes_of_users_and_rules_are_logged(
    env: AccessFixture, caplog: pytest.LogCaptureFixture
) -> None:
    env.table.put_user(User.of("old\n", "secret"), 0)
    with caplog.at_level(logging.INFO, "penstock.audit"):
        env.ask("root", CREATE_USER, {"username": "new"}, {"password": "secret"})
        env.ask("root", UPDATE_USER, {"username": "old\n"}, {"password": "other"})
        env.ask("root", CREATE_ACL, {}, acl("ann", entry("Topic:t", ["Pub", "Sub"])))
    assert [record.getMessage() for record in caplog.records] == [
        "User:root created user new (Normal, enable)",
        r"User:root changed user old\n (Normal, enable)",
        "User:root set rules of User:ann: Allow Pub,Sub on Topic:t",
    ]


def test_the_file_is_readable_only_by_its_owner(env: AccessFixture, tmp_path: Path) -> None:
    env.ask("root", CREATE_ACL, {}, acl("ann", entry("Topic:t*", ["Pub"], "Deny")))
    (tmp_path / "config").mkdir()
    persistence = Persistence(Disk(), tmp_path)
    for _ in range(3):
        persistence.save(env.table)()
    again = AccessTable(env.table.key)
    assert again.load(persistence.file(AccessTable.FILE))
    assert again.users == env.table.users
    assert again.rules == env.table.rules
    assert again.version == env.table.version
    assert not again.dirty
    for path in (tmp_path / "config").glob("penstock-access*"):
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600, path


@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b'{"format":3}',
        b'{"format":2,"users":[{"username":"a","encryptedPassword":"AAAA"}]}',
        b'{"format":1,"users":[{"username":"a"}]}',
        b'{"format":1,"acls":[{"subject":"a"}]}',
        b'{"format":1,"acls":[{"subject":"User:a"}]}',
    ],
)
def test_a_damaged_file_is_not_an_empty_table(content: bytes) -> None:
    class File:
        path = Path("penstock-access.json")

        def read(self, path: Path) -> bytes | None:
            return content if path.suffix == ".json" else None

        def replace(self, path: Path, data: bytes) -> None: ...

        def rename(self, old: Path, new: Path) -> None: ...

    from penstock.store.tables.config_tables import ConfigFile

    with pytest.raises(StoreDamaged):
        AccessTable().load(ConfigFile(File(), File.path))


def test_the_number_of_rules_of_a_user_is_limited(env: AccessFixture) -> None:
    entries = [entry(f"Topic:t{n}", ["Pub"]) for n in range(1_000)]
    assert env.ask("root", CREATE_ACL, {}, acl("ann", *entries)).code == 0
    assert env.ask("root", CREATE_ACL, {}, acl("ann", *entries)).code == 0, "they are replaced"
    for more in (
        acl("ann", entry("Topic:more", ["Pub"])),
        acl("ann", *entries, entry("Topic:more", ["Pub"])),
        acl("ops", {**entry("Topic:t", ["Pub"]), "sourceIps": ["10.0.0.1"] * 1_000}),
    ):
        reply = env.ask("root", CREATE_ACL, {}, more)
        assert reply.code == INVALID
        assert "1001 of them, the limit is 1000" in (reply.remark or "")
    assert (
        len(body(env.ask("root", GET_ACL, {"subject": "User:ann"}))["policies"][0]["entries"])
        == 1_000
    )


def test_the_number_of_users_and_rules_is_limited(
    env: AccessFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(users, "USERS_MAX", len(env.table.users))
    assert env.ask("root", CREATE_USER, {"username": "new"}, {"password": "p"}).code == INVALID
    assert env.ask("root", UPDATE_USER, {"username": "ann"}, {"password": "p"}).code == 0
    long_name = {"username": "n" * 256}
    assert env.ask("root", CREATE_USER, long_name, {"password": "p"}).code == INVALID
    monkeypatch.setattr(users, "RULES_MAX", 2)
    assert env.ask("root", CREATE_ACL, {}, acl("ann", entry("Topic:a", ["Pub"]))).code == 0
    refused = env.ask("root", CREATE_ACL, {}, acl("ann", entry("Topic:b", ["Pub"])))
    assert refused.code == INVALID
    assert "too many rules of all users" in (refused.remark or "")
    assert env.ask("root", DELETE_ACL, {"subject": "User:ops"}).code == 0
    assert env.ask("root", CREATE_ACL, {}, acl("ann", entry("Topic:b", ["Pub"]))).code == 0


def test_a_change_encodes_only_what_has_changed(
    env: AccessFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    env.ask("root", CREATE_ACL, {}, acl("ann", entry("Topic:a", ["Pub"])))
    env.table.snapshot()
    encoded: list[object] = []
    encode = fastjson.encode

    def note(value: object) -> bytes:
        encoded.append(value)
        return encode(value)

    monkeypatch.setattr(fastjson, "encode", note)
    env.ask("root", CREATE_ACL, {}, acl("ops", entry("Topic:a", ["Pub"])))
    before = len(encoded)
    env.table.snapshot()
    assert (before, len(encoded)) == (1, 1)
