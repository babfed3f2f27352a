"""What `benchmarks.neighbour` runs beside a healthy client, in a process of its own.

    python -m benchmarks.attacks PORT NAME SECONDS

An attack is a block of requests that is written again and again, with a limited number of requests
in flight on each of its connections. It prints "begun", then the responses per second.
"""

import json
import selectors
import socket
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tests.faults.healthy_client import read_frame, send_frame

from penstock.wire.codes import RequestCode
from penstock.wire.output import encode

QUEUES_MANY = 1 << 20
QUEUES_WIDE = 100_000
HELD_PULLS = 190_000
HELD_CONNECTIONS = 10
TAGS_BYTES = 900_000
CONFIG_BYTES = 8_000_000
RULES = 100_000


@dataclass(frozen=True)
class Attack:
    """Requests of one kind, what they need before, and how many are in flight per connection."""

    what: str
    block: Callable[[], Iterable[bytes]]
    in_flight: int
    connections: int = 1
    before: Callable[[], Iterable[bytes]] = tuple
    held: Callable[[], Iterable[bytes]] = tuple
    """Requests of HELD_CONNECTIONS other connections that get no response."""


class AttackConnection:
    """Keeps requests in flight on one connection."""

    def __init__(self, port: int, frames: list[bytes], in_flight: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setblocking(False)
        self.answered = 0
        self._sent = 0
        self._in_flight = max(in_flight, len(frames))
        self._requests = len(frames)
        self._block = memoryview(b"".join(frames))
        self._unsent = self._block[:0]
        self._received = bytearray()

    def write(self) -> None:
        """Write as much as the limit and the socket's buffer take."""
        try:
            while self._unsent or self._sent - self.answered <= self._in_flight - self._requests:
                if not self._unsent:
                    self._unsent = self._block
                    self._sent += self._requests
                self._unsent = self._unsent[self.socket.send(self._unsent) :]
        except BlockingIOError:
            return

    @property
    def has_unsent(self) -> bool:
        """Whether the socket's buffer was full before the last block was written."""
        return bool(self._unsent)

    def read(self) -> None:
        """Count the responses that have arrived."""
        try:
            data = self.socket.recv(1 << 18)
        except BlockingIOError:
            return
        if not data:
            raise ConnectionError("the broker closed the connection")
        received, at = self._received, 0
        received += data
        while at + 4 <= len(received):
            end = at + 4 + int.from_bytes(received[at : at + 4], "big")
            if end > len(received):
                break
            at = end
            self.answered += 1
        del received[:at]


def topic_frame(topic: str, queues: int) -> bytes:
    ext = {
        "topic": topic, "defaultTopic": "TBW102", "readQueueNums": str(queues),
        "writeQueueNums": str(queues), "perm": "6", "topicFilterType": "SINGLE_TAG",
        "topicSysFlag": "0", "order": "false",
    }  # fmt: skip
    return encode(RequestCode.UPDATE_AND_CREATE_TOPIC, ext, b"")


def pull_frame(topic: str, tags: str, *, suspend: bool) -> bytes:
    ext = {
        "consumerGroup": "G", "topic": topic, "queueId": "0", "queueOffset": "0",
        "maxMsgNums": "32", "sysFlag": "6" if suspend else "4", "commitOffset": "0",
        "suspendTimeoutMillis": "60000", "subscription": tags, "subVersion": "0",
    }  # fmt: skip
    return encode(RequestCode.PULL_MESSAGE, ext, b"")


def sends() -> Iterable[bytes]:
    return (send_frame(number) for number in range(250))


def wide_topics() -> Iterable[bytes]:
    return topic_frame("Wide", QUEUES_WIDE), topic_frame("TooWide", QUEUES_MANY)


def statistics() -> Iterable[bytes]:
    code = RequestCode.GET_TOPIC_STATS_INFO
    return (encode(code, {"topic": topic}, b"") for topic in ("Wide", "TooWide"))


def users() -> Iterable[bytes]:
    yield encode(RequestCode.AUTH_CREATE_USER, {"username": "u"}, b'{"password":"secret"}')


def access_lists() -> Iterable[bytes]:
    for rules in (RULES, 900):
        entries = [
            {"resource": f"Topic:t{n}", "actions": ["Pub"], "decision": "Allow"}
            for n in range(rules)
        ]
        policies = [{"policyType": "Custom", "entries": entries}]
        body = json.dumps({"subject": "User:u", "policies": policies}).encode()
        yield encode(RequestCode.AUTH_UPDATE_ACL, {"subject": "User:u"}, body)
    yield encode(RequestCode.AUTH_LIST_ACL, {}, b"")


def held_pulls() -> Iterable[bytes]:
    """Pulls that no message of the topic answers: each arrival tries all of them again."""
    return [pull_frame("TopicT", "never", suspend=True)] * HELD_PULLS


def pulls_with_tags() -> Iterable[bytes]:
    tags = "||".join(f"tag{n}" for n in range(TAGS_BYTES // 10))
    return [pull_frame("TopicT", tags, suspend=False)] * 20


def large_settings() -> Iterable[bytes]:
    line = b"flushDiskType=ASYNC_FLUSH\n"
    return [encode(RequestCode.UPDATE_BROKER_CONFIG, {}, line * (CONFIG_BYTES // len(line)))]


def empty_pops() -> Iterable[bytes]:
    ext = {
        "consumerGroup": "P", "topic": "Wide", "queueId": "-1", "maxMsgNums": "32",
        "invisibleTime": "60000", "pollTime": "0", "bornTime": str(int(time.time() * 1000)),
        "initMode": "0", "expType": "TAG", "exp": "*", "order": "false",
    }  # fmt: skip
    return [encode(RequestCode.POP_MESSAGE, ext, b"")] * 100


def heartbeats() -> Iterable[bytes]:
    for number in range(100):
        subscription = {"topic": "TopicT", "subString": "*", "subVersion": number}
        group = {
            "groupName": f"G{number}", "consumeType": "CONSUME_PASSIVELY",
            "messageModel": "CLUSTERING", "consumeFromWhere": "CONSUME_FROM_LAST_OFFSET",
            "subscriptionDataSet": [subscription],
        }  # fmt: skip
        body = {"clientID": f"c{number}", "consumerDataSet": [group], "producerDataSet": []}
        yield encode(RequestCode.HEART_BEAT, {}, json.dumps(body).encode())


def locks() -> Iterable[bytes]:
    queues = [{"topic": "Wide", "brokerName": "broker-a", "queueId": n} for n in range(10_000)]
    body = json.dumps({"consumerGroup": "L", "clientId": "c", "mqSet": queues}).encode()
    return [
        encode(code, {}, body) for code in (RequestCode.LOCK_BATCH_MQ, RequestCode.UNLOCK_BATCH_MQ)
    ]


ATTACKS = {
    "flood": Attack("a producer with 5,000 sends in flight", sends, 5_000),
    "floods": Attack("10 producers with 5,000 sends in flight", sends, 5_000, connections=10),
    "statistics": Attack(
        f"statistics of topics with {QUEUES_WIDE:,} and {QUEUES_MANY:,} queues",
        statistics, 2, before=wide_topics,
    ),
    "rules": Attack(
        f"access lists with {RULES:,} and 900 rules, and their list", access_lists, 3, before=users
    ),
    "held": Attack(
        f"sends that wake {HELD_PULLS:,} held pulls", lambda: [send_frame(1)], 1, held=held_pulls
    ),
    "tags": Attack("20 pulls with 900 KB of tags in flight", pulls_with_tags, 20),
    "settings": Attack("changes of settings with 8 MB", large_settings, 2),
    "pops": Attack("1,000 empty POPs in flight", empty_pops, 1_000, before=wide_topics),
    "heartbeats": Attack("1,000 heartbeats in flight", heartbeats, 1_000),
    "locks": Attack("locks of 10,000 queues", locks, 4, before=wide_topics),
}  # fmt: skip


def main(port: int, name: str, seconds: float) -> None:
    attack = ATTACKS[name]
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        for frame in (send_frame(1), *attack.before()):
            connection.sendall(frame)
            read_frame(connection)
    held, holders = list(attack.held()), []
    for number in range(HELD_CONNECTIONS if held else 0):
        holders.append(socket.create_connection(("127.0.0.1", port)))
        holders[-1].sendall(b"".join(held[number::HELD_CONNECTIONS]))
    frames = list(attack.block())
    selector = selectors.DefaultSelector()
    connections = [
        AttackConnection(port, frames, attack.in_flight) for _ in range(attack.connections)
    ]
    for one in connections:
        selector.register(one.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, one)
    began = time.monotonic()
    print("begun", flush=True)
    while time.monotonic() < began + seconds:
        for key, events in selector.select(0.1):
            one: AttackConnection = key.data
            if events & selectors.EVENT_READ:
                one.read()
            one.write()
            # Waiting for writes with nothing to write would take a whole core.
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if one.has_unsent else 0)
            if wanted != key.events:
                selector.modify(one.socket, wanted, one)
    answered = sum(one.answered for one in connections)
    print(json.dumps(answered / (time.monotonic() - began)), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], float(sys.argv[3]))
