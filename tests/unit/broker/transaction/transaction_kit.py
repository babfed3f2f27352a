"""A broker with transactions: producers send half messages, resolve them and receive checks."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.broker.consumers.client_groups import GroupMember
from penstock.broker.transaction.transactions import Transactions
from penstock.config import Settings
from penstock.errors import PenstockError
from penstock.rpc.answers import NotifyClient, Reply
from penstock.rpc.command import Command
from penstock.rpc.router import refusal
from penstock.wire.codes import RequestCode
from penstock.wire.message import StoredMessage, decode_message, decode_messages
from penstock.wire.message_ids import decode_offset_id
from tests.unit.broker.broker_kit import NOW_MS, BrokerFixture

HALF, OP = "RMQ_SYS_TRANS_HALF_TOPIC", "RMQ_SYS_TRANS_OP_HALF_TOPIC"
DISCARDED = "TRANS_CHECK_MAX_TIME_TOPIC"
SYSTEM_GROUP = "CID_RMQ_SYS_TRANS"
UNKNOWN, COMMIT, ROLLBACK = 0, 8, 12
TIMEOUT_MS, INTERVAL_MS = 6_000, 30_000
PRODUCER = 71  # a connection


@dataclass(frozen=True)
class Sent:
    """A half message as its producer knows it."""

    queue_offset: int
    log_offset: int
    key: str


@dataclass(frozen=True)
class Check:
    """A check that was sent to a producer."""

    client: int
    ext: dict[str, str]
    message: StoredMessage

    @property
    def handle(self) -> Sent:
        return Sent(
            int(self.ext["tranStateTableOffset"]),
            int(self.ext["commitLogOffset"]),
            self.ext["transactionId"],
        )


class Killed(BaseException):
    """Simulates kill -9 of the broker."""


class TransactionFixture(BrokerFixture):
    """A broker with transactions."""

    def __init__(self, root: Path, settings: Settings | None = None, now_ms: int = 0) -> None:
        super().__init__(root, settings, now_ms=now_ms or NOW_MS)
        self.root = root
        self._dead = False

    def close(self) -> None:
        if not self._dead:
            self._dead = True
            super().close()

    @property
    def transactions(self) -> Transactions:
        return self.broker.transactions

    @property
    def open(self) -> int:
        return len(self.transactions.half_messages.open)

    # --- producers

    def half(
        self,
        body: bytes = b"x",
        group: str = "P",
        properties: dict[str, str] | None = None,
        **rest: Any,
    ) -> Sent:
        answer = self.send_half(body, group, properties, **rest)
        assert answer.code == 0, answer.remark
        assert answer.ext is not None
        offset = decode_offset_id(answer.ext["msgId"]).offset
        return Sent(int(answer.ext["queueOffset"]), offset, answer.ext["transactionId"])

    def send_half(
        self,
        body: bytes = b"x",
        group: str = "P",
        properties: dict[str, str] | None = None,
        **rest: Any,
    ) -> Reply:
        marks = {"TRAN_MSG": "true", "PGROUP": group, **(properties or {})}
        return self.send(body=body, properties=marks, **rest)

    def end(
        self,
        sent: Sent,
        state: int = COMMIT,
        *,
        group: str = "P",
        checked: bool = False,
        flag: int = 0,
        fields: dict[str, str] | None = None,
    ) -> Reply:
        """The response to END_TRANSACTION."""
        rest = {"fromTransactionCheck": str(checked).lower(), **(fields or {})}
        answer = self.answer(self.end_command(sent, state, group=group, flag=flag, fields=rest))
        if flag:
            return Reply(-1)
        assert isinstance(answer, Reply), answer
        return answer

    def end_command(
        self,
        sent: Sent,
        state: int = COMMIT,
        *,
        group: str = "P",
        flag: int = 0,
        client: int = 1,
        fields: dict[str, str] | None = None,
    ) -> Command:
        """END_TRANSACTION."""
        ext = {
            "topic": "T",
            "producerGroup": group,
            "tranStateTableOffset": str(sent.queue_offset),
            "commitLogOffset": str(sent.log_offset),
            "commitOrRollback": str(state),
            "fromTransactionCheck": "false",
            "msgId": sent.key,
            "transactionId": sent.key,
            **(fields or {}),
        }
        return Command(
            RequestCode.END_TRANSACTION, ext, now_ms=self.now_ms, flag=flag, client=client
        )

    def answer(self, command: Command) -> Any:
        """Like `handle`, with errors of the second step turned into replies as the server does."""
        try:
            answer = self.finish(self.broker.handle(command))
        except PenstockError as error:
            answer = refusal(error)
        self.store.publish()
        return answer

    def connect(self, client: int = PRODUCER, group: str = "P") -> None:
        """A producer connects, or sends a heartbeat."""
        member = GroupMember(client, f"p{client}", "10.0.0.1:1", 0, 493, self.now_ms)
        self.context.clients.register_producer(group, member)

    def disconnect(self, client: int = PRODUCER) -> None:
        self.broker.disconnected(client, self.now_ms)

    # --- time

    def advance(self, ms: int, *, beat: bool = True) -> list[Check]:
        """Advance the clock as the server does; returns the checks. Producers stay connected."""
        end = self.now_ms + ms
        found = self.checks()
        while self.now_ms < end:
            wake = max(min(self.broker.due(), self.now_ms + 1000), self.now_ms + 1)
            if beat:
                for group, members in self.context.clients.producer_groups().items():
                    for member in members:
                        self.connect(member.client, group)
            self.tick(min(wake, end) - self.now_ms)
            found += self.checks()
        return found

    def checks(self) -> list[Check]:
        """The checks that were sent since the last call."""
        return [
            Check(effect.client, dict(effect.ext), decode_message(effect.body))
            for effect in self.broker.effects.take()
            if isinstance(effect, NotifyClient)
            and effect.code == RequestCode.CHECK_TRANSACTION_STATE
        ]

    # --- contents of the store

    def stored(self, topic: str = "T", queue_id: int = 0) -> list[StoredMessage]:
        """All visible messages of a queue."""
        self.store.publish()
        found: list[StoredMessage] = []
        offset = self.store.min_offset(topic, queue_id)
        while offset < self.store.max_offset(topic, queue_id):
            got = self.store.get(topic, queue_id, offset, wait=True)
            found += decode_messages(got.data)
            offset = got.next_offset
        return found

    def bodies(self, topic: str = "T", queue_id: int = 0) -> list[bytes]:
        return [message.body for message in self.stored(topic, queue_id)]

    def ops(self) -> list[bytes]:
        return self.bodies(OP)

    def progress(self, topic: str) -> int | None:
        return self.context.offsets.get(SYSTEM_GROUP, topic, 0)

    # --- stop and restart

    def flush(self) -> None:
        """Flush as the flusher's thread does."""
        self.store.publish()
        self.store.flusher.pump()
        self.store.publish()

    def save(self) -> None:
        """Write the tables, as the server does every few seconds."""
        for table in self.broker._tables():
            if table.dirty:
                self.context.persistence.save(table)()

    def kill(self) -> None:
        """Stop as by kill -9: the files stay as they are."""
        self._dead = True
        self.store.log.write_staged()
        self.store.flusher.stop()
        self.store.disk.close()
        self.store._lock.release()

    def cut_power(self) -> None:
        """Stop as by a power cut: only the flushed part of the log is left."""
        flushed = self.store.flusher.flushed()
        segments = [(segment.path, segment.start) for segment in self.store.log.segments.items]
        self.kill()
        for path, start in segments:
            data = path.read_bytes()
            keep = min(max(flushed - start, 0), len(data))
            path.write_bytes(data[:keep] + bytes(len(data) - keep))

    def restart(self, *, clean: bool = False) -> "TransactionFixture":
        """A new broker on the same store."""
        if clean:
            self.close()
        elif not self._dead:
            self.kill()
        return TransactionFixture(self.root, self.live.current, self.now_ms)


@contextmanager
def transaction_fixture(
    root: Path, settings: Settings | None = None, now_ms: int = 0
) -> Iterator[TransactionFixture]:
    made = TransactionFixture(root, settings, now_ms)
    try:
        yield made
    finally:
        made.close()
