"""Sessions in memory: they end when the console restarts.

The cookie holds a random token; the console keeps only its hash. Whatever ends sessions returns
them, because a session of a user of the brokers has a client that must be closed.
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
        token = secrets.token_urlsafe(32)
        session = LoginSession(login, now_ms, now_ms)
        self._sessions[_key(token)] = session
        return token, session

    def find(self, token: str | None, now_ms: int) -> LoginSession | None:
        """The session with this token, unless it has expired."""
        if not token:
            return None
        session = self._sessions.get(_key(token))
        if session is None or _has_expired(session, now_ms):
            return None
        session.used_ms = now_ms
        return session

    def has(self, token: str | None, now_ms: int) -> bool:
        """Whether there is a session with this token. Asking does not count as use."""
        session = self._sessions.get(_key(token or ""))
        return session is not None and not _has_expired(session, now_ms)

    def count_of(self, name: str, now_ms: int) -> int:
        """How often a user is logged in."""
        return sum(
            session.login.name == name and not _has_expired(session, now_ms)
            for session in self._sessions.values()
        )

    def end(self, token: str | None) -> list[LoginSession]:
        """Remove the session with this token, if there is one."""
        return self._remove([_key(token or "")])

    def end_expired(self, now_ms: int) -> list[LoginSession]:
        """Remove the sessions that have expired, and the least used ones if there are too many."""
        ended = [key for key, session in self._sessions.items() if _has_expired(session, now_ms)]
        too_many = len(self._sessions) - len(ended) - SESSIONS_MAX
        if too_many > 0:
            kept = self._sessions.keys() - set(ended)
            ended += sorted(kept, key=lambda key: self._sessions[key].used_ms)[:too_many]
        return self._remove(ended)

    def end_all_of(self, name: str) -> list[LoginSession]:
        """Remove the sessions of a user, whose password or role has changed."""
        return self._remove(
            [key for key, session in self._sessions.items() if session.login.name == name]
        )

    def end_all(self) -> list[LoginSession]:
        """Remove all sessions."""
        return self._remove(list(self._sessions))

    def _remove(self, keys: list[bytes]) -> list[LoginSession]:
        return [self._sessions.pop(key) for key in keys if key in self._sessions]


def same_token(given: str | None, expected: str) -> bool:
    """Compare tokens in constant time."""
    return given is not None and hmac.compare_digest(given.encode(), expected.encode())


def _has_expired(session: LoginSession, now_ms: int) -> bool:
    return now_ms - session.used_ms > IDLE_MS or now_ms - session.created_ms > LIFETIME_MS


def _key(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
