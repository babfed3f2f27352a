"""Sessions in memory: they end when the console restarts.

The cookie holds a random token; the console keeps only its hash.
"""

import hashlib
import hmac
import secrets
from dataclasses import dataclass, field

from penstock.console.security.accounts import Login

IDLE_MS = 8 * 3_600_000
LIFETIME_MS = 7 * 24 * 3_600_000
SESSIONS_MAX = 10_000


@dataclass(slots=True)
class LoginSession:
    """A user who has logged in, and the token that changes must carry."""

    login: Login
    created_ms: int
    used_ms: int
    csrf: str = field(default_factory=lambda: secrets.token_urlsafe(24))


class Sessions:
    """The sessions by the hash of their token."""

    def __init__(self) -> None:
        self._sessions: dict[bytes, LoginSession] = {}

    def create(self, login: Login, now_ms: int) -> tuple[str, LoginSession]:
        """A new session and the token for its cookie."""
        for key in [k for k, s in self._sessions.items() if _has_expired(s, now_ms)]:
            self._sessions.pop(key)
        while len(self._sessions) >= SESSIONS_MAX:
            self._sessions.pop(next(iter(self._sessions)))
        token = secrets.token_urlsafe(32)
        session = LoginSession(login, now_ms, now_ms)
        self._sessions[_key(token)] = session
        return token, session

    def find(self, token: str | None, now_ms: int) -> LoginSession | None:
        """The session with this token, unless it has expired."""
        if not token:
            return None
        session = self._sessions.get(_key(token))
        if session is None:
            return None
        if _has_expired(session, now_ms):
            self._sessions.pop(_key(token))
            return None
        session.used_ms = now_ms
        return session

    def end(self, token: str | None) -> LoginSession | None:
        """Remove the session with this token."""
        return self._sessions.pop(_key(token), None) if token else None

    def end_all_of(self, name: str) -> list[LoginSession]:
        """Remove the sessions of a user, whose password or role has changed."""
        keys = [key for key, session in self._sessions.items() if session.login.name == name]
        return [self._sessions.pop(key) for key in keys]

    def all(self) -> list[LoginSession]:
        return list(self._sessions.values())


def same_token(given: str | None, expected: str) -> bool:
    """Compare tokens in constant time."""
    return given is not None and hmac.compare_digest(given.encode(), expected.encode())


def _has_expired(session: LoginSession, now_ms: int) -> bool:
    return now_ms - session.used_ms > IDLE_MS or now_ms - session.created_ms > LIFETIME_MS


def _key(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
