"""A POP client of a broker fixture."""

from pathlib import Path
from typing import Any, NamedTuple

from penstock.config import BrokerConfig, Settings
from penstock.rpc.answers import Answer, PersistSoon, Reply, Suspend
from penstock.server.request_loop import RequestLoop
from penstock.wire import fastjson
from penstock.wire.bodies.client_bodies import BatchAck, BatchAckMessageRequestBody
from penstock.wire.codes import CUT_CODES, POP_ORDER_REVIVE_QUEUE, RequestCode
from penstock.wire.message import StoredMessage, decode_messages
from penstock.wire.output import encode
from penstock.wire.receipt_handle import (
    QueueKey,
    Receipt,
    kind_of,
    parse_message_offsets,
    parse_receipt,
    parse_start_offsets,
    retry_topic,
)
from tests.store_kit import small_config
from tests.unit.broker.broker_kit import BrokerFixture

REVIVE = "rmq_sys_REVIVE_LOG_DefaultCluster"


def pop_settings(**changes: Any) -> Settings:
    return Settings(store=small_config(sync_flush=False), broker=BrokerConfig(**changes))


def serve_by_rules(env: BrokerFixture) -> None:
    """Let the router handle the requests of POP from now on: none of them is handled in place."""
    in_place = env.broker.router.in_place
    kept = {code: handler for code, handler in in_place.items() if code not in CUT_CODES.values()}
    env.request_loop = RequestLoop(env.broker, kept, time_ns=lambda: 0)


class Popped(NamedTuple):
    """A message with its receipt, as RocketMQ's clients make it."""

    message: StoredMessage
    receipt: Receipt

    @property
    def body(self) -> bytes:
        return self.message.body


class PopClient:
    """Pops for one group from one topic, over frames."""

    def __init__(self, env: BrokerFixture, topic: str = "T", group: str = "G") -> None:
        self.env = env
        self.topic = topic
        self.group = group

    def ask(self, **ext: Any) -> Answer:
        fields = {
            "consumerGroup": self.group,
            "topic": self.topic,
            "queueId": -1,
            "maxMsgNums": 32,
            "invisibleTime": 10_000,
            "pollTime": 0,
            "bornTime": self.env.now_ms,
            "initMode": 0,
            "order": "false",
        } | ext
        named = {name: str(value) for name, value in fields.items() if value is not None}
        return self.env.frame(encode(RequestCode.POP_MESSAGE, named, opaque=9, version=493))

    def suspend(self, wait_ms: int = 15_000, **ext: Any) -> Suspend:
        answer = self.ask(pollTime=wait_ms, **ext)
        assert isinstance(answer, Suspend), answer
        return answer

    def pop(self, **ext: Any) -> list[Popped]:
        answer = self.ask(**ext)
        assert isinstance(answer, Reply), answer
        if answer.code == 210:
            return []
        assert answer.code == 0, answer
        return self.read(answer)

    def bodies(self, **ext: Any) -> list[bytes]:
        return [popped.body for popped in self.pop(**ext)]

    def read(self, answer: Reply) -> list[Popped]:
        """Messages with receipts, by the rules of MQClientAPIImpl."""
        ext = answer.ext
        assert ext is not None
        starts = parse_start_offsets(ext["startOffsetInfo"])
        offsets = parse_message_offsets(ext["msgOffsetInfo"])
        found = []
        for message in decode_messages(answer.body):
            text = message.properties.get("POP_CK")
            if text is not None:
                found.append(Popped(message, parse_receipt(text)))
                continue
            key = QueueKey(kind_of(message.topic), message.queue_id)
            assert message.queue_offset in offsets[key]
            receipt = Receipt(
                starts[key],
                int(ext["popTime"]),
                int(ext["invisibleTime"]),
                int(ext["reviveQid"]),
                key.kind,
                "broker-a",
                message.queue_id,
                message.queue_offset,
            )
            found.append(Popped(message, receipt))
        return found

    def named(self, receipt: Receipt) -> dict[str, str]:
        """The fields of requests for a message."""
        return {
            "consumerGroup": self.group,
            "topic": retry_topic(self.topic, self.group, receipt.kind),
            "queueId": str(receipt.queue_id),
            "offset": str(receipt.queue_offset),
            "extraInfo": receipt.format(),
        }

    def ack(self, popped: Popped) -> Reply:
        return self.env.ask(RequestCode.ACK_MESSAGE, self.named(popped.receipt))

    def ack_all(self, popped: list[Popped]) -> None:
        for one in popped:
            assert self.ack(one).code == 0

    def ack_batch(self, popped: list[Popped]) -> Reply:
        batches: dict[Receipt, int] = {}
        for one in popped:
            assert one.receipt.queue_offset is not None
            key = one.receipt._replace(queue_offset=None)
            batches[key] = batches.get(key, 0) | 1 << one.receipt.queue_offset - key.start_offset
        acks = [
            BatchAck(
                consumer_group=self.group,
                topic=self.topic,
                retry=r.kind,
                queue_id=r.queue_id,
                start_offset=r.start_offset,
                revive_queue_id=r.revive_queue_id,
                pop_time=r.pop_ms,
                invisible_time=r.invisible_ms,
                bit_set=bits.to_bytes(64, "little").rstrip(b"\0"),
            )
            for r, bits in batches.items()
        ]
        body = fastjson.encode(BatchAckMessageRequestBody(broker_name="broker-a", acks=acks))
        return self.env.ask(RequestCode.BATCH_ACK_MESSAGE, {}, body)

    def change(self, popped: Popped, invisible_ms: int) -> Popped:
        """Change the invisible time of a message; returns it with the new receipt handle."""
        reply = self.ask_change(popped, invisible_ms)
        assert reply.code == 0, reply
        assert reply.ext is not None
        ordered = popped.receipt.revive_queue_id == POP_ORDER_REVIVE_QUEUE
        offset = popped.receipt.queue_offset
        assert offset is not None
        receipt = popped.receipt._replace(
            start_offset=popped.receipt.start_offset if ordered else offset,
            pop_ms=int(reply.ext["popTime"]),
            invisible_ms=int(reply.ext["invisibleTime"]),
            revive_queue_id=int(reply.ext["reviveQid"]),
        )
        return popped._replace(receipt=receipt)

    def ask_change(self, popped: Popped, invisible_ms: int) -> Reply:
        ext = {**self.named(popped.receipt), "invisibleTime": str(invisible_ms)}
        return self.env.ask(RequestCode.CHANGE_MESSAGE_INVISIBLETIME, ext)

    def notify(self, wait_ms: int = 0, **ext: Any) -> Answer:
        fields = {
            "consumerGroup": self.group,
            "topic": self.topic,
            "queueId": -1,
            "pollTime": wait_ms,
            "bornTime": self.env.now_ms,
            "order": "false",
        } | ext
        named = {name: str(value) for name, value in fields.items() if value is not None}
        return self.env.frame(encode(RequestCode.NOTIFICATION, named, opaque=9))


def advance(env: BrokerFixture, ms: int) -> None:
    """Advance the clock as the server does: until the broker is due, a second at most."""
    end = env.now_ms + ms
    while env.now_ms < end:
        wake = max(min(env.broker.due(), env.now_ms + 1000), env.now_ms + 1)
        env.tick(min(wake, end) - env.now_ms)


def reopen(env: BrokerFixture, root: Path, *, crash: bool = False) -> BrokerFixture:
    """Restart the broker, after a clean stop or as if it had been killed."""
    now_ms, settings = env.now_ms, env.live.current
    if crash:
        kill(env)
    else:
        env.close()
    return BrokerFixture(root, settings, now_ms=now_ms)


def kill(env: BrokerFixture) -> None:
    """Stop a broker as kill -9 does: the page cache survives, tables are not saved."""
    env.store.writer.publish()
    env.store._release()


def stored(env: BrokerFixture, topic: str = "T", queue_id: int = 0) -> list[StoredMessage]:
    """All messages of a queue."""
    env.store.publish()
    found: list[StoredMessage] = []
    offset = env.store.min_offset(topic, queue_id)
    while offset < env.store.max_offset(topic, queue_id):
        got = env.store.get(topic, queue_id, offset, count_max=512, wait=True)
        found += decode_messages(got.data)
        offset = max(got.next_offset, offset + 1)
    return found


def persist(env: BrokerFixture) -> None:
    """Save the tables that are due, as the server does."""
    for effect in env.broker.effects.take():
        if isinstance(effect, PersistSoon) and effect.table.dirty:
            env.context.persistence.save(effect.table)()
