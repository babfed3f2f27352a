"""The key that encrypts passwords at rest, and its file.

Signatures need the password itself (HMAC), so it can't be stored as a hash. A stored password is

    base64(nonce, password encrypted by AES-256-GCM with the user's name as associated data)

The key is the 32 random bytes of the key file, whose mode is 0600.
"""

import os
import secrets
from base64 import b64decode, b64encode
from binascii import Error as Base64Error
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from penstock.errors import BodyError, StoreDamaged

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

KEY_BYTES: Final = 32
_NONCE_BYTES: Final = 12


class PasswordKey:
    """Encrypts and decrypts passwords."""

    def __init__(self, key: bytes | None = None, path: Path | None = None) -> None:
        """Without `key`, a new one; it is not on disk until `save`."""
        self._key = secrets.token_bytes(KEY_BYTES) if key is None else key
        self._path = path
        self.saved = key is not None or path is None

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
        data = self._cipher().encrypt(nonce, _encode(password), _encode(user))
        return b64encode(nonce + data).decode()

    def decrypt(self, user: str, stored: str) -> str:
        """A stored password; raises BodyError if it was stored with another key or changed."""
        from cryptography.exceptions import InvalidTag

        try:
            data = b64decode(stored, validate=True)
            nonce, encrypted = data[:_NONCE_BYTES], data[_NONCE_BYTES:]
            plain = self._cipher().decrypt(nonce, encrypted, _encode(user))
        except (InvalidTag, Base64Error, ValueError):
            raise BodyError(
                f"the password of user {user} was encrypted with another key",
                hint=f"restore the key file {self._path} (setting access.key_file)",
            ) from None
        return plain.decode("utf-8", "surrogatepass")

    def _cipher(self) -> "AESGCM":
        # Imported here: brokers without users do not need its memory.
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        return AESGCM(self._key)


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
