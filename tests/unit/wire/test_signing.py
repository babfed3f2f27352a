"""Signatures. The expected ones were made by the Java class AclClientRPCHook of RocketMQ 5.4.0."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.wire.signing import (
    TIME_TOLERANCE_MS,
    is_signed,
    is_strictly_signed,
    signed,
    signer,
    strict_signer,
    text_bytes,
)

EXT = {"topic": "TopicTest", "queueId": "3", "Z": "z", "_UNIQUE_KEY_QUERY": "true"}


@pytest.mark.parametrize(
    ("ext", "body", "access", "secret", "token", "signature"),
    [
        ({}, b"", "a", "s", None, "9kUJmuedeRrYUGQeZkrMLCeYfJ0="),
        (EXT, b"\x00\x01\x02", "rocketmq", "12345678", "token", "nOFA+41lUITcG9CYEtel8UY+6TA="),
        (
            {"topic": "主题🚀", "": "x"},
            b"body",
            "用户",
            "密码",
            None,
            "n3wflT1Uo8NzeFOD7gTjV3MQJ9I=",
        ),
        (
            {"\ue000": "1", "\U0001f680": "2", "z": "\n"},
            b"",
            "a",
            "s",
            None,
            "sWg4ZCUd8fc3tX9VFvkehLUKPpg=",
        ),
    ],
)
def test_signatures_equal_those_of_java(
    ext: dict[str, str], body: bytes, access: str, secret: str, token: str | None, signature: str
) -> None:
    made = signed(ext, body, access_key=access, secret_key=secret, token=token)
    assert made["Signature"] == signature
    assert made["AccessKey"] == access
    assert made.get("SecurityToken") == token


@given(
    ext=st.dictionaries(st.text(max_size=5), st.text(max_size=20), max_size=5),
    body=st.binary(max_size=50),
    secret=st.text(min_size=1, max_size=30),
)
def test_signatures_are_verified(ext: dict[str, str], body: bytes, secret: str) -> None:
    made = signed(ext, body, access_key="user", secret_key=secret)
    assert is_signed(made, body, text_bytes(secret), version=493)
    assert not is_signed(made, body + b"!", text_bytes(secret), version=493)
    assert not is_signed({**made, "more": "x"}, body, text_bytes(secret), version=493)
    assert not is_signed(made, body, text_bytes(secret) + b"!", version=493)


def test_a_long_body_is_signed_in_place() -> None:
    body = bytes(range(256)) * 1024
    made = signed({"topic": "t"}, body, access_key="user", secret_key="s")
    assert is_signed(made, memoryview(body), b"s", version=493)
    assert not is_signed(made, body[:-1] + b"x", b"s", version=493)


def test_signing_again_gives_the_same_signature() -> None:
    once = signed({"topic": "t"}, b"", access_key="user", secret_key="s")
    assert signed(once, b"", access_key="user", secret_key="s") == once


def test_a_field_added_by_old_clients_after_signing_is_ignored() -> None:
    made = signed({"topic": "t"}, b"", access_key="user", secret_key="s")
    made["_UNIQUE_KEY_QUERY"] = "true"
    assert is_signed(made, b"", b"s", version=399)
    assert not is_signed(made, b"", b"s", version=400)


def test_a_missing_signature_is_none() -> None:
    assert not is_signed({"AccessKey": "user"}, b"", b"s", version=493)
    assert not is_signed({"AccessKey": "user", "Signature": ""}, b"", b"s", version=493)
    assert not is_signed({"AccessKey": "user", "Signature": "ü\udc80"}, b"", b"s", version=493)


def test_a_signer_signs_each_request() -> None:
    sign = signer("user", "s", "t")
    assert sign(10, {"a": "1"}, b"x") == signed(
        {"a": "1"}, b"x", access_key="user", secret_key="s", token="t"
    )


NOW_MS = 1_700_000_000_000


def strictly_signed(code: int = 310, ext: dict[str, str] | None = None) -> dict[str, str]:
    return strict_signer("ann", "secret", lambda: NOW_MS, "token")(code, ext or EXT, b"body")


def test_a_strict_signature_covers_code_names_values_and_body() -> None:
    fields = strictly_signed()
    assert fields["SecurityToken"] == "token"
    assert "Signature" not in fields

    def valid(
        code: int, ext: dict[str, str], body: bytes = b"body", key: bytes = b"secret"
    ) -> bool:
        return is_strictly_signed(code, ext, body, key, now_ms=NOW_MS)

    assert valid(310, fields)
    assert not valid(105, fields)
    assert not valid(310, fields, b"Body")
    assert not valid(310, fields, key=b"guess")
    renamed = {("topiC" if name == "topic" else name): text for name, text in fields.items()}
    moved = fields | {"queueId": "", "topic": "3TopicTest"}
    for changed in (renamed, moved, fields | {"more": ""}, fields | {"SignedAt": str(NOW_MS + 1)}):
        assert not valid(310, changed)
    for missing in ("SignedAt", "StrictSignature"):
        assert not valid(310, {name: text for name, text in fields.items() if name != missing})


def test_a_strict_signature_expires() -> None:
    fields = strictly_signed()
    for later_ms, valid in ((TIME_TOLERANCE_MS, True), (TIME_TOLERANCE_MS + 1, False)):
        for now_ms in (NOW_MS + later_ms, NOW_MS - later_ms):
            found = is_strictly_signed(310, fields, b"body", b"secret", now_ms=now_ms)
            assert found is valid


@given(st.dictionaries(st.text(), st.text()), st.dictionaries(st.text(), st.text()))
def test_a_strict_signature_is_of_one_request_only(
    ext: dict[str, str], other: dict[str, str]
) -> None:
    sign = strict_signer("ann", "secret", lambda: NOW_MS)
    fields = sign(310, ext, b"")
    assert is_strictly_signed(310, fields, b"", b"secret", now_ms=NOW_MS)
    forged = {**other, **{name: fields[name] for name in fields if name not in ext}}
    signature = fields["StrictSignature"]
    same = forged == fields or sign(310, other, b"")["StrictSignature"] == signature
    assert is_strictly_signed(310, forged, b"", b"secret", now_ms=NOW_MS) is same
