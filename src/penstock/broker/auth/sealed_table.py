"""Users and access lists on their way from a master to a slave.

The master encrypts passwords on its disk with a key of its own, so it sends them in plain text
inside of a message that only the holders of the replicas' shared secret can read:

    nonce (12), AES-256-GCM(key, table, associated data: the challenge of the request)
    key = HMAC-SHA256(secret, "penstock access table")

The challenge is random and used once: an old answer can't replace a new one.
"""

import hashlib
import hmac
import secrets
from typing import Final

from penstock.broker.auth.users import AccessFile, AccessTable
from penstock.errors import BodyError
from penstock.wire import fastjson

CHALLENGE_BYTES: Final = 16
_NONCE_BYTES: Final = 12
_LABEL: Final = b"penstock access table"


def new_challenge() -> str:
    """The challenge of a request."""
    return secrets.token_hex(CHALLENGE_BYTES)


def seal(content: AccessFile, secret: str, challenge: str) -> bytes:
    """Encrypt a table; takes some time for thousands of users."""
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    nonce = secrets.token_bytes(_NONCE_BYTES)
    return nonce + AESGCM(_key(secret)).encrypt(nonce, fastjson.encode(content), challenge.encode())


def unseal(table: AccessTable, data: bytes, secret: str, challenge: str) -> AccessFile:
    """Decrypt and check a table; raises BodyError if the master has another secret."""
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    nonce, encrypted = data[:_NONCE_BYTES], data[_NONCE_BYTES:]
    try:
        plain = AESGCM(_key(secret)).decrypt(nonce, encrypted, challenge.encode())
    except (InvalidTag, ValueError):
        raise BodyError(
            "the users of the master can't be decrypted: it has another secret",
            hint="set replication.secret to the same value on all replicas of the broker",
        ) from None
    return table.parse(plain)


def _key(secret: str) -> bytes:
    return hmac.digest(secret.encode(), _LABEL, hashlib.sha256)
