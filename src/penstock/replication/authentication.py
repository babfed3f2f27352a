"""Mutual authentication of Penstock peers by a shared secret, before the first replication frame.

| From   | Bytes                                                                            |
|--------|----------------------------------------------------------------------------------|
| slave  | `PENSTHA1`, slave nonce (32)                                                     |
| master | master nonce (32), HMAC-SHA256(secret, "master" + slave nonce + master nonce)    |
| slave  | HMAC-SHA256(secret, "slave" + slave nonce + master nonce)                        |

Each side proves that it knows the secret, for these two nonces only, so a recorded exchange can't
be replayed. The labels prevent that a peer's own proof is sent back to it. A nonce must be random
and used once. What follows is neither encrypted nor authenticated: that needs TLS.

The objects do no I/O. `receive` takes what has arrived, in pieces of any length, and returns the
bytes to send, which may be none. Once `done` is True, `rest` holds what arrived after the
authentication, and `receive` must not be called again.
"""

import hashlib
import hmac
from typing import Final

from penstock.errors import ReplicationError

MAGIC: Final = b"PENSTHA1"
NONCE_BYTES: Final = 32
PROOF_BYTES: Final = 32
HELLO_BYTES: Final = len(MAGIC) + NONCE_BYTES
CHALLENGE_BYTES: Final = NONCE_BYTES + PROOF_BYTES

_MASTER: Final = b"master"
_SLAVE: Final = b"slave"


class _Authentication:
    """The secret, the own nonce, and input that is not complete yet."""

    def __init__(self, secret: bytes, nonce: bytes) -> None:
        assert secret, "an empty secret protects nothing"
        assert len(nonce) == NONCE_BYTES
        self.done = False
        self._secret = secret
        self._nonce = nonce
        self._input = bytearray()

    @property
    def rest(self) -> bytes:
        """What arrived after the authentication."""
        assert self.done
        return bytes(self._input)

    def _take(self, length: int) -> bytes | None:
        """The next bytes of the input; None if they have not all arrived."""
        if len(self._input) < length:
            return None
        taken = bytes(self._input[:length])
        del self._input[:length]
        return taken

    def _proof(self, label: bytes, slave_nonce: bytes, master_nonce: bytes) -> bytes:
        return hmac.digest(self._secret, label + slave_nonce + master_nonce, hashlib.sha256)


class MasterAuthentication(_Authentication):
    """The master's side of one connection."""

    def __init__(self, secret: bytes, nonce: bytes) -> None:
        super().__init__(secret, nonce)
        self._expected: bytes | None = None  # the slave's proof, once its nonce is known

    def receive(self, data: bytes | bytearray | memoryview) -> bytes:
        """The bytes to send to the slave; ReplicationError if it does not know the secret."""
        assert not self.done
        self._input += data
        reply = b""
        if self._expected is None:
            reply = self._answer_hello()
        if self._expected is not None and (proof := self._take(PROOF_BYTES)) is not None:
            if not hmac.compare_digest(proof, self._expected):
                raise ReplicationError(
                    "the slave does not know the secret of this master",
                    hint="give all replicas of the broker the same secret",
                )
            self.done = True
        return reply

    def _answer_hello(self) -> bytes:
        begin = self._input[: len(MAGIC)]
        if not MAGIC.startswith(begin):
            raise ReplicationError(
                "the slave does not authenticate itself",
                hint="give the slave the master's secret; Apache slaves know no authentication",
            )
        hello = self._take(HELLO_BYTES)
        if hello is None:
            return b""
        slave_nonce = hello[len(MAGIC) :]
        self._expected = self._proof(_SLAVE, slave_nonce, self._nonce)
        return self._nonce + self._proof(_MASTER, slave_nonce, self._nonce)


class SlaveAuthentication(_Authentication):
    """The slave's side of one connection."""

    def hello(self) -> bytes:
        """The first bytes to send to the master."""
        return MAGIC + self._nonce

    def receive(self, data: bytes | bytearray | memoryview) -> bytes:
        """The bytes to send to the master; ReplicationError if it does not know the secret."""
        assert not self.done
        self._input += data
        challenge = self._take(CHALLENGE_BYTES)
        if challenge is None:
            return b""
        master_nonce, proof = challenge[:NONCE_BYTES], challenge[NONCE_BYTES:]
        expected = self._proof(_MASTER, self._nonce, master_nonce)
        if not hmac.compare_digest(proof, expected):
            raise ReplicationError(
                "the master does not know the secret of this slave",
                hint="give all replicas of the broker the same secret",
            )
        self.done = True
        return self._proof(_SLAVE, self._nonce, master_nonce)
