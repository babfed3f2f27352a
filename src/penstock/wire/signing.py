"""Signed requests: the sender proves that it knows the user's secret key, without sending it.

Three named fields are added: `AccessKey` (the user's name), `SecurityToken` (optional) and

    Signature = base64(HMAC-SHA1(secret key, content))
    content   = the values of all named fields except the signature, in the order of their names
                and without separators, then the body

Names are ordered as Java orders strings, by UTF-16 units. Code, opaque, version and remark are not
signed, and a signature does not prevent replay: only TLS does.

A strict signature, which only Penstock has, replaces `Signature` by `SignedAt` (milliseconds) and

    StrictSignature = base64(HMAC-SHA256(secret key, content))
    content         = a prefix, the code, the number of named fields except the signature, their
                      names and values in the order of the names, each of these with its length,
                      then the body

So it is of no use for another code, with other names of fields, or after `TIME_TOLERANCE_MS`.
"""

import hmac
from binascii import b2a_base64
from collections.abc import Callable, Mapping
from typing import Final

from penstock.wire.java_numbers import parse_long

ACCESS_KEY: Final = "AccessKey"
SECURITY_TOKEN: Final = "SecurityToken"
SIGNATURE: Final = "Signature"
SIGNED_AT: Final = "SignedAt"
STRICT_SIGNATURE: Final = "StrictSignature"

TIME_TOLERANCE_MS: Final = 300_000
"""How old a strict signature may be, and how far the clocks of client and server may differ."""

UNSIGNED_FIELD: Final = "_UNIQUE_KEY_QUERY"
"""Clients up to 4.9.3 add this field after they have signed."""
UNSIGNED_VERSION_MAX: Final = 399  # V4_9_3

_JOIN_BYTES_MAX = 64 * 1024  # bodies beyond it are hashed where they are instead of copied


def signed(
    ext: Mapping[str, str],
    body: bytes,
    *,
    access_key: str,
    secret_key: str,
    token: str | None = None,
) -> dict[str, str]:
    """The fields with access key and signature; they must not change afterwards."""
    fields = {**ext, ACCESS_KEY: access_key}
    if token is not None:
        fields[SECURITY_TOKEN] = token
    fields[SIGNATURE] = _signature(fields, body, text_bytes(secret_key)).decode()
    return fields


def signer(
    access_key: str, secret_key: str, token: str | None = None
) -> Callable[[int, Mapping[str, str], bytes], dict[str, str]]:
    """A function that signs the fields of each request: (code, fields, body) → signed fields."""

    def sign(code: int, ext: Mapping[str, str], body: bytes) -> dict[str, str]:
        return signed(ext, body, access_key=access_key, secret_key=secret_key, token=token)

    return sign


def strict_signer(
    access_key: str, secret_key: str, now_ms: Callable[[], int], token: str | None = None
) -> Callable[[int, Mapping[str, str], bytes], dict[str, str]]:
    """Like `signer`, with strict signatures."""
    secret = text_bytes(secret_key)

    def sign(code: int, ext: Mapping[str, str], body: bytes) -> dict[str, str]:
        fields = {**ext, ACCESS_KEY: access_key, SIGNED_AT: str(now_ms())}
        if token is not None:
            fields[SECURITY_TOKEN] = token
        fields[STRICT_SIGNATURE] = _strict_signature(code, fields, body, secret).decode()
        return fields

    return sign


def is_strictly_signed(
    code: int, ext: Mapping[str, str], body: bytes | memoryview, secret: bytes, *, now_ms: int
) -> bool:
    """Whether the request has a strict signature with `secret`, made about `now_ms`."""
    claimed, signed_at = ext.get(STRICT_SIGNATURE), ext.get(SIGNED_AT, "")
    made_ms = parse_long(signed_at)
    if claimed is None or made_ms is None or abs(now_ms - made_ms) > TIME_TOLERANCE_MS:
        return False
    return hmac.compare_digest(_strict_signature(code, ext, body, secret), text_bytes(claimed))


def is_signed(
    ext: Mapping[str, str], body: bytes | memoryview, secret: bytes, *, version: int
) -> bool:
    """Whether the request is signed with `secret`; compares in constant time. `version` is the one
    in the request's header."""
    claimed = ext.get(SIGNATURE)
    if claimed is None:
        return False
    if version <= UNSIGNED_VERSION_MAX and UNSIGNED_FIELD in ext:
        ext = {name: value for name, value in ext.items() if name != UNSIGNED_FIELD}
    return hmac.compare_digest(_signature(ext, body, secret), text_bytes(claimed))


def text_bytes(text: str) -> bytes:
    """A text as it is signed, and as a key; a lone surrogate becomes `?`, as in Java."""
    return text.encode("utf-8", "replace")


def _signature(ext: Mapping[str, str], body: bytes | memoryview, secret: bytes) -> bytes:
    names = sorted(ext)
    if not "".join(names).isascii():
        names.sort(key=_utf16)
    content = text_bytes("".join([ext[name] for name in names if name != SIGNATURE]))
    if len(body) <= _JOIN_BYTES_MAX:
        digest = hmac.digest(secret, content + body, "sha1")
    else:
        hashed = hmac.new(secret, content, "sha1")
        hashed.update(body)
        digest = hashed.digest()
    return b2a_base64(digest, newline=False)


def _strict_signature(
    code: int, ext: Mapping[str, str], body: bytes | memoryview, secret: bytes
) -> bytes:
    names = sorted(name for name in ext if name != STRICT_SIGNATURE)
    texts = [b"penstock strict signature", b"%d" % code, b"%d" % len(names)]
    for name in names:
        texts += (text_bytes(name), text_bytes(ext[name]))
    hashed = hmac.new(secret, b"".join(b"%d:%b" % (len(text), text) for text in texts), "sha256")
    hashed.update(body)
    return b2a_base64(hashed.digest(), newline=False)


def _utf16(text: str) -> bytes:
    return text.encode("utf-16-be", "surrogatepass")
