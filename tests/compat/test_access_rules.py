"""Access control beside Apache's: signatures, administration, and what the same rules decide.

The same requests go to an Apache broker with authentication and authorization on, and to our own
parts, without a server around them. This is also the proof of how ties are decided: between rules
of the same resource Deny wins in 5.4.0.
"""

from __future__ import annotations

import base64
import json
import socket
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest

from penstock.broker.admin.auth_admin import AuthAdmin
from penstock.broker.auth.access_control import AccessControl
from penstock.broker.auth.users import AccessTable
from penstock.broker.context import BrokerContext
from penstock.cli.main import main
from penstock.config import AccessConfig, LiveSettings, Settings
from penstock.rpc.answers import EffectQueue, InThread, Reply
from penstock.rpc.command import Command
from penstock.rpc.router import Router
from penstock.wire.codes import RequestCode, ResponseCode
from penstock.wire.signing import is_signed, signed, text_bytes
from tests.depth import rounds

from . import apache, maven
from .java_session import JavaSession

pytestmark = [pytest.mark.compat, pytest.mark.slow, pytest.mark.usefixtures("java")]

SECRETS = {"root": "root-secret", "alice": "alice-secret", "bob": "密码-🔑", "carol": "c" * 80}
CLUSTER = "DefaultCluster"
REFUSED = int(ResponseCode.NO_PERMISSION)


class Answer(NamedTuple):
    """What a cluster says to a request."""

    code: int
    remark: str
    body: Any


class Apache:
    """The real broker."""

    def __init__(self, address: str, nameserver: str) -> None:
        self.address = address
        self.nameserver = nameserver
        host, port = address.split(":")
        self._connection = socket.create_connection((host, int(port)), timeout=10)
        self._stream = self._connection.makefile("rb")

    def send(self, code: int, ext: dict[str, str], body: bytes, version: int) -> Answer:
        fields = {"code": code, "opaque": 1, "extFields": ext, "version": version, "flag": 0}
        header = json.dumps(fields).encode()
        sizes = (4 + len(header) + len(body), len(header))
        self._connection.sendall(b"".join(n.to_bytes(4, "big") for n in sizes) + header + body)
        frame = self._stream.read(int.from_bytes(self._stream.read(4), "big"))
        size = int.from_bytes(frame[:4], "big") & 0xFFFFFF
        answer = json.loads(frame[4 : 4 + size])
        return Answer(answer["code"], answer.get("remark") or "", frame[4 + size :])

    def close(self) -> None:
        self._stream.close()
        self._connection.close()


class Ours:
    """Our parts, without a server."""

    def __init__(self) -> None:
        config = AccessConfig(
            authentication=True, authorization=True, initial_user=f"root:{SECRETS['root']}"
        )
        effects = EffectQueue()
        self.access = AccessControl(LiveSettings(Settings(access=config)), AccessTable(), effects)
        self.access.seed(0)
        context = cast(BrokerContext, SimpleNamespace(access=self.access, persistence=self))
        self._router = Router([AuthAdmin(context).rows()])

    def send(self, code: int, ext: dict[str, str], body: bytes, version: int) -> Answer:
        command = Command(code, ext, body, peer="127.0.0.1:4711", version=version)
        reply = self.access.check(command) or self._router.handle(command)
        if isinstance(reply, InThread):
            reply = reply.then(reply.work())
        assert isinstance(reply, Reply)
        return Answer(reply.code, reply.remark or "", reply.body)

    def save(self, table: AccessTable) -> Callable[[], None]:
        """In the place of Persistence: nothing is kept."""
        return lambda: None


AnyBroker = Apache | Ours


def ask(
    broker: AnyBroker,
    who: str,
    code: int,
    ext: dict[str, str],
    body: Any = None,
    *,
    version: int = 493,
) -> Answer:
    """The answer to a signed request; a body of JSON is parsed."""
    data = b"" if body is None else json.dumps(body).encode()
    fields = signed(ext, data, access_key=who, secret_key=SECRETS[who])
    answer = broker.send(code, fields, data, version)
    text = answer.body.decode() if code in range(3001, 3011) else ""
    return answer._replace(body=json.loads(text) if text else None)


@pytest.fixture(scope="module", params=maven.SERVER_VERSIONS[: rounds(ci=1, proof=2)])
def broker(
    java: None, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Apache]:
    root = tmp_path_factory.mktemp("access")
    conf = {
        "brokerClusterName": CLUSTER,
        **apache.access_control("root", SECRETS["root"]),
    }
    version = request.param
    with (
        apache.NameServer(root / "names", version=version) as names,
        apache.Broker(
            root / "broker", root / "store", names.address, version=version, **conf
        ) as server,
    ):
        cluster = Apache(server.address, names.address)
        yield cluster
        cluster.close()


@pytest.fixture(scope="module")
def clusters(broker: Apache) -> tuple[Apache, Ours]:
    return broker, Ours()


def test_what_java_signs_is_signed_for_us(java54: JavaSession) -> None:
    body = base64.b64encode(bytes(range(256)) * 400).decode()
    cases: list[dict[str, Any]] = [
        {"access": "a", "secret": "s", "token": None, "ext": {}, "body": ""},
        {
            "access": "a",
            "secret": "s",
            "token": "t",
            "ext": {"b": "1", "B": "2", "_": "3"},
            "body": body,
        },
        {
            "access": "用户",
            "secret": "密码",
            "token": None,
            "ext": {"topic": "主题🚀", "": "x"},
            "body": "AAEC",
        },
        {
            "access": "a",
            "secret": "s",
            "token": None,
            "ext": {"\ue000": "1", "\U0001f680": "2", "z": "\n", "_UNIQUE_KEY_QUERY": "true"},
            "body": "",
        },
    ]
    lines = java54.do("sign", requests=cases)
    assert len(lines) == len(cases)
    for case, ext in zip(cases, lines, strict=True):
        secret, data = text_bytes(case["secret"]), base64.b64decode(case["body"])
        assert is_signed(ext, data, secret, version=493)
        assert not is_signed(ext, data + b"x", secret, version=493)
        assert not is_signed({**ext, "more": "1"}, data, secret, version=493)
        assert not is_signed(ext, data, secret + b"x", version=493)


def test_both_take_the_same_signatures(clusters: tuple[Apache, Ours]) -> None:
    code = RequestCode.AUTH_LIST_USER
    for cluster in clusters:
        assert ask(cluster, "root", code, {}).code == 0
        assert cluster.send(code, {}, b"", 493).code == REFUSED
        assert cluster.send(code, {"AccessKey": "root"}, b"", 493).code == REFUSED
        wrong = signed({}, b"", access_key="root", secret_key="guess")
        assert cluster.send(code, wrong, b"", 493).code == REFUSED
        stranger = signed({}, b"", access_key="nobody", secret_key="guess")
        assert cluster.send(code, stranger, b"", 493).code == REFUSED
        # Added after signing: let through for old clients only.
        late = signed({}, b"", access_key="root", secret_key=SECRETS["root"])
        late["_UNIQUE_KEY_QUERY"] = "true"
        assert cluster.send(code, late, b"", 399).code == 0
        assert cluster.send(code, late, b"", 400).code == REFUSED


def rule(resource: str, actions: str, decision: str = "Allow", *ips: str) -> dict[str, Any]:
    return {
        "resource": resource,
        "actions": actions.split(","),
        "sourceIps": list(ips) or None,
        "decision": decision,
    }


def acl(who: str, *rules: dict[str, Any], kind: str = "Custom") -> dict[str, Any]:
    return {"subject": f"User:{who}", "policies": [{"policyType": kind, "entries": list(rules)}]}


CREATE_USER, UPDATE_USER, DELETE_USER, GET_USER, LIST_USER = range(3001, 3006)
CREATE_ACL, UPDATE_ACL, DELETE_ACL, GET_ACL, LIST_ACL = range(3006, 3011)


def _user(name: str, **more: str) -> tuple[dict[str, str], dict[str, str]]:
    return {"username": name}, {"username": name, "password": SECRETS[name], **more}


def _subject(name: str, **more: str) -> dict[str, str]:
    return {"subject": f"User:{name}", **more}


# (who, code, fields, body): administration, in this order.
STEPS: list[tuple[str, int, dict[str, str], Any]] = [
    ("root", CREATE_USER, *_user("alice", userType="normal")),
    ("root", CREATE_USER, *_user("alice")),
    ("root", CREATE_USER, *_user("bob", userStatus="disable")),
    ("root", CREATE_USER, {"username": "carol"}, {"userType": "Normal"}),
    ("root", CREATE_USER, *_user("carol", userType="nonsense")),
    ("root", CREATE_USER, {}, {"password": "x"}),
    ("root", GET_USER, {"username": "alice"}, None),
    ("root", GET_USER, {"username": "dave"}, None),
    ("root", GET_USER, {}, None),
    ("root", LIST_USER, {}, None),
    ("root", LIST_USER, {"filter": "o"}, None),
    ("root", LIST_USER, {"filter": "zzz"}, None),
    ("bob", LIST_USER, {}, None),
    ("root", UPDATE_USER, {"username": "bob"}, {"userStatus": "ENABLE"}),
    ("bob", LIST_USER, {}, None),
    ("root", UPDATE_USER, {"username": "dave"}, {"userStatus": "ENABLE"}),
    ("root", GET_ACL, _subject("alice"), None),
    ("root", GET_ACL, _subject("dave"), None),
    ("root", LIST_ACL, {}, None),
    ("root", CREATE_ACL, _subject("dave"), acl("dave", rule("*", "All"))),
    ("root", CREATE_ACL, _subject("alice"), acl("alice", rule("Foo:x", "All"))),
    ("root", CREATE_ACL, _subject("alice"), acl("alice", rule("Topic:x", "Fly"))),
    ("root", CREATE_ACL, _subject("alice"), acl("alice", rule("Topic:x", "Any"))),
    ("root", CREATE_ACL, _subject("alice"), acl("alice", rule("Topic:x", "Pub", "Maybe"))),
    ("root", CREATE_ACL, _subject("alice"), acl("alice", rule("Topic:x", "Pub", "Allow", "1.2.3"))),
    ("root", CREATE_ACL, _subject("alice"), acl("alice", rule("*", "Pub", "Allow", "::/129"))),
    ("root", CREATE_ACL, _subject("alice"),
     acl("alice", rule("topic:a*", "pub,SUB,fly", "allow", "127.0.0.1", "10.0.0.0/8", "fe::/9"))),
    ("root", CREATE_ACL, _subject("alice"), acl("alice", rule("Group:g", "Sub"))),
    ("root", UPDATE_ACL, _subject("alice"), acl("alice", rule("Topic:a*", "All", "Deny"))),
    ("root", UPDATE_ACL, _subject("alice"), acl("alice", rule("*", "Get"), kind="Default")),
    ("root", UPDATE_ACL, _subject("bob"), acl("bob", rule("Cluster:*", "Get,Update"), kind="x")),
    ("root", GET_ACL, _subject("alice"), None),
    ("root", LIST_ACL, {}, None),
    ("root", LIST_ACL, {"subjectFilter": "bo"}, None),
    ("root", LIST_ACL, {"resourceFilter": "Topic:"}, None),
    ("root", LIST_ACL, {"resourceFilter": "alice"}, None),
    ("root", LIST_ACL, {"resourceFilter": "nothing"}, None),
    # bob may change the cluster and is no super user
    ("bob", LIST_USER, {"filter": "alice"}, None),
    ("bob", CREATE_USER, {"username": "eve"}, {"password": "p", "userType": "Super"}),
    ("bob", UPDATE_USER, {"username": "alice"}, {"userType": "Super"}),
    ("bob", UPDATE_USER, {"username": "root"}, {"password": "mine"}),
    ("bob", DELETE_USER, {"username": "root"}, None),
    ("bob", UPDATE_ACL, _subject("carol"), acl("carol", rule("Topic:c", "Sub"))),
    ("carol", UPDATE_ACL, _subject("carol"), acl("carol", rule("*", "All"))),
    ("root", DELETE_ACL, _subject("alice", resource="Topic:a*"), None),
    ("root", DELETE_ACL, _subject("alice", resource="Topic:unknown"), None),
    ("root", DELETE_ACL, _subject("alice", resource="*", policyType="Default"), None),
    ("root", GET_ACL, _subject("alice"), None),
    ("root", DELETE_ACL, _subject("alice", resource="Group:g"), None),
    ("root", GET_ACL, _subject("alice"), None),
    ("root", DELETE_ACL, _subject("alice"), None),
    ("root", DELETE_ACL, _subject("dave"), None),
    ("root", DELETE_ACL, _subject("bob"), None),
    ("root", DELETE_USER, {"username": "carol"}, None),
    ("root", DELETE_USER, {"username": "carol"}, None),
    ("root", LIST_ACL, {}, None),
    ("root", LIST_USER, {}, None),
]  # fmt: skip


def without_passwords(body: Any) -> Any:
    """The users of a response as Penstock shows them."""
    if isinstance(body, list):
        return [without_passwords(one) for one in body]
    if isinstance(body, dict) and "userType" in body:
        return {name: value for name, value in body.items() if name != "password"}
    return body


def test_administration_answers_alike(clusters: tuple[Apache, Ours]) -> None:
    for number, (who, code, ext, body) in enumerate(STEPS):
        theirs, ours = (ask(cluster, who, code, ext, body) for cluster in clusters)
        theirs = theirs._replace(body=without_passwords(theirs.body))
        context = f"step {number}: {who} {code} {ext} {body}\n{theirs}\n{ours}"
        assert (ours.code == 0, ours.body) == (theirs.code == 0, theirs.body), context
        if theirs.code != 1:  # a null pointer there, a sentence here
            assert ours.code == theirs.code, context
        assert ours.code == 0 or ours.remark, context


SEND, PULL, MAX_OFFSET, CREATE_TOPIC = 310, 11, 30, 17
_CONFIG = {"topic": "x", "readQueueNums": "1", "writeQueueNums": "1", "perm": "6",
           "topicFilterType": "SINGLE_TAG", "defaultTopic": "TBW102", "topicSysFlag": "0",
           "order": "false"}  # fmt: skip


def request(code: int, topic: str, group: str = "g") -> dict[str, str]:
    """Fields by which the codes above name a topic (and a group)."""
    if code == SEND:
        return {"a": group, "b": topic, "c": "TBW102", "d": "4", "e": "0", "f": "0", "g": "0",
                "h": "0", "i": ""}  # fmt: skip
    if code == PULL:
        return {"consumerGroup": group, "topic": topic, "queueId": "0", "queueOffset": "0",
                "maxMsgNums": "1", "sysFlag": "4", "commitOffset": "0", "subVersion": "0",
                "suspendTimeoutMillis": "0", "subscription": "*"}  # fmt: skip
    if code == CREATE_TOPIC:
        return {**_CONFIG, "topic": topic}
    return {"topic": topic, "queueId": "0"}


ALL, HERE, AWAY = "All", ("127.0.0.0/8",), ("10.1.2.3", "192.168.0.0/16")
# Rules (the first list is Custom, the second Default) → requests.
CASES: list[tuple[list[dict[str, Any]], list[dict[str, Any]], list[tuple[int, str]]]] = [
    # ties: the same resource twice
    ([rule("Topic:t", "Pub"), rule("Topic:t", "Pub", "Deny")], [], [(SEND, "t")]),
    ([rule("Topic:t", "Pub", "Deny"), rule("Topic:t", "Pub")], [], [(SEND, "t")]),
    ([rule("Topic:t", ALL), rule("Topic:t", "Sub", "Deny")], [], [(SEND, "t"), (MAX_OFFSET, "t")]),
    ([rule("Topic:t*", ALL), rule("Topic:t*", ALL, "Deny")], [], [(SEND, "t1")]),
    ([rule("*", ALL), rule("*", ALL, "Deny")], [], [(SEND, "t")]),
    ([rule("Topic:*", ALL), rule("Topic:*", "Pub", "Deny")], [], [(SEND, "t"), (MAX_OFFSET, "t")]),
    # the most specific one
    ([rule("Topic:t", ALL), rule("Topic:*", ALL, "Deny")], [], [(SEND, "t"), (SEND, "u")]),
    ([rule("Topic:t", ALL, "Deny"), rule("*", ALL)], [], [(SEND, "t"), (SEND, "u"), (PULL, "u")]),
    (
        [rule("Topic:abc*", ALL, "Deny"), rule("Topic:ab*", ALL)],
        [],
        [(SEND, "abcd"), (SEND, "abd")],
    ),
    (
        [rule("Topic:ab*", ALL, "Deny"), rule("Topic:abc*", ALL)],
        [],
        [(SEND, "abcd"), (SEND, "abd")],
    ),
    ([rule("Topic:*", ALL), rule("*", ALL, "Deny")], [], [(SEND, "t"), (PULL, "t")]),
    ([rule("Topic:ab*", ALL, "Deny"), rule("Topic:abc", ALL)], [], [(SEND, "abc"), (SEND, "ab")]),
    # default policies
    ([rule("Topic:t", "Pub")], [rule("*", ALL, "Deny")], [(SEND, "t"), (MAX_OFFSET, "t")]),
    ([rule("Topic:t", "Pub", "Deny")], [rule("*", ALL)], [(SEND, "t"), (MAX_OFFSET, "t")]),
    ([rule("*", "Pub")], [rule("Topic:t", ALL, "Deny")], [(SEND, "t")]),
    # where from
    ([rule("Topic:t", ALL, "Allow", *HERE)], [], [(SEND, "t")]),
    ([rule("Topic:t", ALL, "Allow", *AWAY)], [], [(SEND, "t")]),
    ([rule("Topic:t", ALL, "Deny", *AWAY), rule("Topic:*", ALL)], [], [(SEND, "t")]),
    ([rule("Topic:t", ALL, "Deny", "127.0.0.1"), rule("Topic:*", ALL)], [], [(SEND, "t")]),
    # what a consumer needs
    ([rule("Topic:t", "Sub")], [], [(PULL, "t"), (MAX_OFFSET, "t"), (SEND, "t")]),
    ([rule("Group:g", "Sub")], [], [(PULL, "t"), (PULL, "%RETRY%g"), (SEND, "%RETRY%g")]),
    ([rule("Topic:t", "Sub"), rule("Group:g", "Sub")], [], [(PULL, "t"), (PULL, "%RETRY%g")]),
    ([rule("Group:*", ALL)], [], [(PULL, "t"), (SEND, "t"), (CREATE_TOPIC, "t")]),
    # kinds of actions, odd names
    ([rule("Topic:t", "Create")], [], [(CREATE_TOPIC, "t"), (SEND, "t"), (MAX_OFFSET, "t")]),
    ([rule("Topic:ns%t", "Pub")], [], [(SEND, "ns%t"), (SEND, "t")]),
    ([rule("Cluster:*", ALL)], [], [(SEND, "t"), (CREATE_TOPIC, "t")]),
    ([rule("Topic:%DLQ%g", "Get")], [], [(MAX_OFFSET, "%DLQ%g")]),
]


def test_the_same_rules_decide_alike_and_deny_wins_ties(clusters: tuple[Apache, Ours]) -> None:
    decisions = []
    for cluster in clusters:
        ask(cluster, "root", CREATE_USER, *_user("alice"))
        decided = []
        for custom, default, requests in CASES:
            ask(cluster, "root", DELETE_ACL, _subject("alice"))
            policies = acl("alice", *custom)["policies"]
            policies += acl("alice", *default, kind="Default")["policies"] if default else []
            body = {"subject": "User:alice", "policies": policies}
            assert ask(cluster, "root", CREATE_ACL, _subject("alice"), body).code == 0
            for code, topic in requests:
                answer = ask(cluster, "alice", code, request(code, topic))
                decided.append((custom, default, code, topic, answer.code == REFUSED))
        decisions.append(decided)
    theirs, ours = decisions
    assert ours == theirs
    assert [refused for *_, refused in theirs[:2]] == [True, True]  # whichever comes first


# Open to any user who can sign in Apache, not here.
STRICTER: list[tuple[int, dict[str, str], Any]] = [
    (RequestCode.GET_BROKER_CONFIG, {"x": "1"}, None),
    (RequestCode.GET_BROKER_RUNTIME_INFO, {"x": "1"}, None),
    (RequestCode.GET_ALL_TOPIC_CONFIG, {"x": "1"}, None),
    (RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, {"x": "1"}, {"groupName": "other"}),
    (RequestCode.UPDATE_BROKER_CONFIG, {"x": "1"}, None),
    (RequestCode.LITE_PULL_MESSAGE, request(PULL, "secret"), None),
    (
        RequestCode.HEART_BEAT,
        {"x": "1"},
        {"clientID": "c", "producerDataSet": [{"groupName": "p"}]},
    ),
]


def test_what_apache_leaves_open_takes_a_right_here(clusters: tuple[Apache, Ours]) -> None:
    for cluster in clusters:
        ask(cluster, "root", CREATE_USER, *_user("alice"))
        ask(cluster, "root", DELETE_ACL, _subject("alice"))
    theirs, ours = clusters
    for code, ext, body in STRICTER:
        assert ask(theirs, "alice", code, ext, body).code != REFUSED, code
        answer = ask(ours, "alice", code, ext, body)
        assert answer.code == REFUSED, code
        assert "User:alice may not " in answer.remark


def test_every_request_code_is_refused_without_rights(clusters: tuple[Apache, Ours]) -> None:
    _, ours = clusters
    ask(ours, "root", CREATE_USER, *_user("alice"))
    ask(ours, "root", DELETE_ACL, _subject("alice"))
    for code in [*RequestCode, 99_999]:
        assert ask(ours, "alice", code, {}).code == REFUSED, code
        assert ours.send(code, {}, b"", 493).code == REFUSED, code


def test_our_commands_administer_apache(
    broker: Apache, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_CLIENT_ACCESS_KEY", "root")
    monkeypatch.setenv("PENSTOCK_CLIENT_SECRET_KEY", SECRETS["root"])

    def run(*words: str) -> tuple[int, str]:
        code = main(list(words))
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    at = ("-b", broker.address)
    by_name = ("-n", broker.nameserver)
    assert run("user", "create", "dora", *by_name, "--password", "p1") == (
        0,
        f"created user dora on {broker.address}\n",
    )
    code, text = run("user", "create", "dora", *at, "--password", "p1")
    assert code == 1
    assert text.startswith(f"penstock: {broker.address}: ")
    assert run("user", "update", "dora", *at, "--disable", "--password", "p2")[0] == 0
    code, text = run("user", "get", "dora", *at, "--show-password", "--json")
    assert json.loads(text) == [
        {"user": "dora", "type": "Normal", "status": "disable", "password": "p2"}
    ]
    assert "p2" not in run("user", "list", *at, "--filter", "dor")[1]
    assert run("acl", "grant", "dora", "Topic:d*", "Pub,Sub", *at, "--from", "10.0.0.0/8")[0] == 0
    assert run("acl", "deny", "dora", "*", "All", *by_name, "-c", CLUSTER)[0] == 0
    code, text = run("acl", "get", "dora", *at)
    lines = [line.split() for line in text.splitlines()]
    assert lines[1:] == [
        ["dora", "Custom", "Topic:d*", "Pub,Sub", "10.0.0.0/8", "Allow"],
        ["dora", "Custom", "*", "All", "anywhere", "Deny"],
    ]
    assert run("acl", "delete", "dora", "Topic:d*", "--yes", *at)[0] == 0
    listed = json.loads(run("acl", "list", *at, "--user", "dora", "--json")[1])
    assert [entry["resource"] for entry in listed] == ["*"]
    assert run("user", "delete", "dora", "--yes", *at)[0] == 0
    assert run("user", "get", "dora", *at) == (1, "penstock: user dora does not exist\n")
    assert run("user", "list", *at, "--secret-key", "wrong")[0] == 1
