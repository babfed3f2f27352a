"""A whole broker with access control, and users who sign their requests, each on its connection."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.broker.auth.policies import PolicyType, Rule
from penstock.broker.auth.users import User
from penstock.config import AccessConfig, Settings
from penstock.errors import PenstockError
from penstock.rpc.answers import Answer, Reply
from penstock.rpc.router import refusal
from penstock.server.request_loop import RequestLoop
from penstock.wire.message import encode_properties
from penstock.wire.output import encode
from penstock.wire.signing import signed
from tests.store_kit import small_config
from tests.unit.broker.broker_kit import BORN, BrokerFixture

from .access_kit import ON

ROOT = "root"  # a super user


class AccessBroker(BrokerFixture):
    """A broker with users; the password of each is its name twice."""

    def __init__(self, root: Path, access: AccessConfig = ON) -> None:
        super().__init__(root, Settings(access=access, store=small_config(sync_flush=False)))
        checked = self.context.access if self.context.access.enabled() else None
        self.request_loop = RequestLoop(self.broker, self.broker.router.in_place, checked)
        self._clients: dict[str, int] = {}
        self.add(ROOT, type="Super")

    def add(self, name: str, *rules: Rule, type: str = "Normal") -> None:
        """Add a user, or replace its rules."""
        self.context.access.table.put_user(User.of(name, name * 2, type), self.now_ms)
        self.context.access.table.put_rules(name, {PolicyType.CUSTOM: list(rules)}, self.now_ms)

    def client_of(self, connection: str) -> int:
        """The number of a connection, by a name of the test."""
        return self._clients.setdefault(connection, 100 + len(self._clients))

    def answer_to(
        self, user: str, code: int, ext: dict[str, str], body: bytes = b"", *, connection: str = ""
    ) -> Answer:
        """The answer to a request of a user; by default each user has one connection."""
        fields = signed(ext, body, access_key=user, secret_key=user * 2) if user else ext
        data = encode(code, fields, body, opaque=7, version=493)
        loop = self.request_loop
        loop.bind(memoryview(bytearray(data)), BORN)
        loop.set_client(self.client_of(connection or user), "192.0.2.7:4711", BORN)
        loop.serve(0, len(data), self.now_ms)
        if loop.deferred:
            answer = loop.deferred.pop()[3]
            try:
                return self.finish(answer)
            except PenstockError as error:
                return refusal(error)
        return self.read_output()

    def ask_as(
        self, user: str, code: int, ext: dict[str, str], body: bytes = b"", *, connection: str = ""
    ) -> Reply:
        answer = self.answer_to(user, code, ext, body, connection=connection)
        assert isinstance(answer, Reply), answer
        return answer

    def send_as(
        self, user: str, topic: str, body: bytes = b"x", *, flags: int = 0, **properties: str
    ) -> Reply:
        """A send; `properties` by name."""
        key = f"{self.store.log.end:032X}"
        ext = {
            "a": "g", "b": topic, "c": "TBW102", "d": "4", "e": "0", "f": str(flags),
            "g": str(self.now_ms), "h": "0", "j": "0", "m": "false",
            "i": encode_properties({"UNIQ_KEY": key, **properties}).decode(),
        }  # fmt: skip
        return self.ask_as(user, 310, ext, body)

    def pass_seconds(self, count: int) -> None:
        for _ in range(count):
            self.tick(1_000)


@contextmanager
def access_broker(root: Path, access: AccessConfig = ON) -> Iterator[AccessBroker]:
    made = AccessBroker(root, access)
    try:
        yield made
    finally:
        made.close()
