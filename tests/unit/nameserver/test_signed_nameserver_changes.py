"""A NameServer that accepts changes only from known users."""

import logging

import pytest

from penstock.config import AccessConfig
from penstock.errors import BadSetting
from penstock.nameserver.signed_nameserver_changes import READS, SignedNameServerChanges
from penstock.rpc.answers import Reply
from penstock.rpc.command import Command
from penstock.wire.codes import RequestCode, ResponseCode
from penstock.wire.signing import signed

from .nameserver_kit import NameServerFixture

CHANGES = SignedNameServerChanges(
    AccessConfig(initial_user="admin:a:b", internal_user="inner:secret")
)
CHANGING = [
    RequestCode.REGISTER_BROKER,
    RequestCode.UNREGISTER_BROKER,
    RequestCode.BROKER_HEARTBEAT,
    RequestCode.QUERY_DATA_VERSION,
    RequestCode.REGISTER_TOPIC_IN_NAMESRV,
    RequestCode.WIPE_WRITE_PERM_OF_BROKER,
    RequestCode.ADD_WRITE_PERM_OF_BROKER,
    RequestCode.DELETE_TOPIC_IN_NAMESRV,
    RequestCode.PUT_KV_CONFIG,
    RequestCode.DELETE_KV_CONFIG,
    RequestCode.UPDATE_NAMESRV_CONFIG,
]


def refused(code: int, user: str = "", password: str = "", body: bytes = b"body") -> str | None:
    ext = {"brokerName": "b"}
    if user:
        ext = signed(ext, b"body", access_key=user, secret_key=password)
    reply = CHANGES.check(Command(code, ext, body, peer="192.0.2.7:4711", version=493))
    if reply is None:
        return None
    assert reply.code == ResponseCode.NO_PERMISSION
    return reply.remark


@pytest.mark.parametrize("code", [*CHANGING, 99_999])
def test_a_change_needs_the_signature_of_a_known_user(code: int) -> None:
    assert refused(code, "admin", "a:b") is None
    assert refused(code, "inner", "secret") is None
    assert "the request is not signed" in (refused(code) or "")
    for user, password in (("inner", "guess"), ("mallory", "secret"), ("mallory", "")):
        assert "unknown user or wrong signature" in (refused(code, user, password) or "")
    assert refused(code, "inner", "secret", b"other body") is not None


@pytest.mark.parametrize("code", sorted(READS))
def test_a_read_needs_no_signature(code: int) -> None:
    assert refused(code) is None


def test_every_request_of_a_nameserver_is_a_read_or_a_change() -> None:
    names = NameServerFixture().names
    unsupported = ResponseCode.REQUEST_CODE_NOT_SUPPORTED
    answers = {code: names.handle(Command(code)) for code in RequestCode}
    served = {
        code
        for code, answer in answers.items()
        if not (isinstance(answer, Reply) and answer.code == unsupported)
    }
    assert served == {*READS, *CHANGING}


def test_a_refusal_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "penstock.audit"):
        refused(RequestCode.UNREGISTER_BROKER, "mal\nlory", "x")
    assert [record.getMessage() for record in caplog.records] == [
        "refused subject=mal\\nlory source=192.0.2.7 request=UNREGISTER_BROKER "
        "why=unknown user or wrong signature"
    ]


def test_it_needs_a_user() -> None:
    with pytest.raises(BadSetting, match="needs a user"):
        SignedNameServerChanges(AccessConfig())
