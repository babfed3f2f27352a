"""The key that encrypts passwords at rest, and its file.

Signatures need the password itself (HMAC), so it can't be stored as a hash. A stored password is

    base64(nonce, encrypted password, tag)

It is encrypted with a key stream of HMAC-SHA256 over nonce and block number. The tag is the
HMAC-SHA256 over nonce, encrypted password and user name (encrypt-then-MAC). Both keys are derived
from the 32 random bytes of the key file, whose mode is 0600.
"""

import hmac
import os
import secrets
from base64 import b64decode, b64encode
from binascii import Error as Base64Error
from pathlib import Path
from typing import Final, Self

from penstock.errors import BodyError, StoreDamaged

KEY_BYTES: Final = 32
_NONCE_BYTES: Final = 16
_TAG_BYTES: Final = 32


class PasswordKey:
    """Encrypts and decrypts passwords."""

    def __init__(self, key: bytes | None = None, path: Path | None = None) -> None:
        """Without `key`, a new one; it is not on disk until `save`."""
        self._key = secrets.token_bytes(KEY_BYTES) if key is None else key
        self._path = path
        self.saved = key is not None or path is None
        self._stream_key = self._derived(b"encryption")
        self._tag_key = self._derived(b"authentication")

    @classmethod
    def load(cls, path: Path) -> Self:
        """The key in a file, or a new one if the file does not exist. Raises StoreDamaged."""
        try:
            text = path.read_bytes()
        except FileNotFoundError:
            return cls(path=path)
        except OSError as error:
            raise StoreDamaged(
                f"the key file {path} can't be read: {error.strerror}",
                hint="its owner must be the user of the broker (setting access.key_file)",
            ) from None
        try:
            key = bytes.fromhex(text.decode("ascii"))
        except ValueError:
            key = b""
        if len(key) != KEY_BYTES:
            raise StoreDamaged(
                f"the key file {path} is not valid: it must have {2 * KEY_BYTES} hex digits",
                hint="restore it from a backup (setting access.key_file)",
            )
        return cls(key, path)

    def save(self) -> None:
        """Write a new key to its file. Waits for the disk."""
        if self.saved or self._path is None:
            return
        beside = self._path.with_name(self._path.name + ".tmp")
        beside.unlink(missing_ok=True)
        fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, self._key.hex().encode())
            os.fsync(fd)
        finally:
            os.close(fd)
        beside.rename(self._path)
        folder = os.open(self._path.parent, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        self.saved = True

    def encrypt(self, user: str, password: str) -> str:
        """The password as it is stored."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        sealed = nonce + self._with_stream(nonce, password.encode("utf-8", "surrogatepass"))
        return b64encode(sealed + self._tag(user, sealed)).decode()

    def decrypt(self, user: str, stored: str) -> str:
        """A stored password; raises BodyError if it was stored with another key or changed."""
        try:
            data = b64decode(stored, validate=True)
        except (Base64Error, ValueError):
            data = b""
        sealed, tag = data[:-_TAG_BYTES], data[-_TAG_BYTES:]
        if len(sealed) < _NONCE_BYTES or not hmac.compare_digest(tag, self._tag(user, sealed)):
            raise BodyError(
                f"the password of user {user} was encrypted with another key",
                hint=f"restore the key file {self._path} (setting access.key_file)",
            )
        plain = self._with_stream(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:])
        return plain.decode("utf-8", "surrogatepass")

    def _derived(self, purpose: bytes) -> bytes:
        return hmac.digest(self._key, b"penstock passwords " + purpose, "sha256")

    def _tag(self, user: str, sealed: bytes) -> bytes:
        name = user.encode("utf-8", "surrogatepass")
        length = len(sealed).to_bytes(4, "big")
        return hmac.digest(self._tag_key, length + sealed + name, "sha256")

    def _with_stream(self, nonce: bytes, data: bytes) -> bytes:
        """The data, encrypted or decrypted."""
        stream = b""
        while len(stream) < len(data):
            block = len(stream).to_bytes(8, "big")
            stream += hmac.digest(self._stream_key, nonce + block, "sha256")
        return bytes(one ^ other for one, other in zip(data, stream, strict=False))
