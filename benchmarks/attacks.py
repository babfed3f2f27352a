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
QUEUES_DELETED = 20_000
HELD_PULLS = 190_000
HELD_CONNECTIONS = 10
TAGS_BYTES = 900_000
CONFIG_BYTES = 8_000_000
RULES = 100_000
MEMBER_GROUPS = 1_000
MEMBERS = 5_000
RESPONSE = b'"flag":1,'


@dataclass(frozen=True)
class Attack:
    """Requests of one kind, what they need before, and how many are in flight per connection."""

    what: str
    block: Callable[[], Iterable[bytes]]
    in_flight: int
    connections: int = 1
    before: Callable[[], Iterable[bytes]] = tuple
    held: Callable[[], Iterable[bytes]] = tuple
    """Requests of other connections, which do not read responses."""
    held_connections: int = HELD_CONNECTIONS


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
            self.answered += RESPONSE in received[at:end]  # others are notifications
            at = end
        del received[:at]


def topic_frame(topic: str, queues: int) -> bytes:
    ext = {
        "topic": topic, "defaultTopic": "TBW102", "readQueueNums": str(queues),
        "writeQueueNums": str(queues), "perm": "6", "topicFilterType": "SINGLE_TAG",
        "topicSysFlag": "0", "order": "false",
    }  # fmt: skip
    return encode(RequestCode.UPDATE_AND_CREATE_TOPIC, ext, b"")


def pull_frame(topic: str, tags: str, *, suspend: bool, queue_id: int = 0) -> bytes:
    ext = {
        "consumerGroup": "G", "topic": topic, "queueId": str(queue_id), "queueOffset": "0",
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


def pop_frame(group: str, poll_ms: int, code: int = RequestCode.POP_MESSAGE) -> bytes:
    """A pop of the topic Wide by a group that starts at the newest message."""
    ext = {
        "consumerGroup": group, "topic": "Wide", "queueId": "-1", "maxMsgNums": "32",
        "invisibleTime": "60000", "pollTime": str(poll_ms), "initMode": "1", "expType": "TAG",
        "exp": "*", "order": "false",
    }  # fmt: skip
    return encode(code, ext, b"")


def empty_pops() -> Iterable[bytes]:
    return [pop_frame("P", 0)] * 100


def waiting_pops() -> Iterable[bytes]:
    for number in range(10):
        yield pop_frame(f"P{number}", 1_000)
        yield pop_frame(f"P{number}", 1_000, RequestCode.NOTIFICATION)
        yield pop_frame(f"P{number}", 0, RequestCode.PEEK_MESSAGE)


def wide_offsets() -> Iterable[bytes]:
    """A topic, and a group with an offset on each of its queues."""
    return topic_frame("Wide", QUEUES_WIDE), pop_frame("G", 0)


def offset_changes() -> Iterable[bytes]:
    topic = {"topic": "Wide"}
    commit = {**topic, "consumerGroup": "G", "queueId": "1", "commitOffset": "0"}
    yield encode(RequestCode.UPDATE_CONSUMER_OFFSET, commit, b"")
    clone = {**topic, "srcGroup": "G", "destGroup": "H", "offline": "true"}
    yield encode(RequestCode.CLONE_GROUP_OFFSET, clone, b"")
    yield encode(RequestCode.GET_ALL_CONSUMER_OFFSET, {}, b"")
    reset = {**topic, "group": "G", "timestamp": "-1", "isForce": "true"}
    yield encode(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, reset, b"")


def deletions() -> Iterable[bytes]:
    """A topic is created; the first pull of each queue makes the queue; the topic is deleted."""
    yield topic_frame("Gone", QUEUES_DELETED)
    for queue_id in range(QUEUES_DELETED):
        yield pull_frame("Gone", "*", suspend=False, queue_id=queue_id)
    yield encode(RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": "Gone"}, b"")


def topic_lists() -> Iterable[bytes]:
    """Lists of topics that exist: many long requests are worked off in steps at the same time."""
    configs = [
        {"topicName": f"t{n}", "readQueueNums": 1, "writeQueueNums": 1, "perm": 6}
        for n in range(2_000)
    ]
    body = json.dumps({"topicConfigList": configs}).encode()
    return [encode(RequestCode.UPDATE_AND_CREATE_TOPIC_LIST, {}, body)] * 20


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


def member_frame(client_id: str, member_groups: int = MEMBER_GROUPS) -> bytes:
    """The heartbeat of a member of the first groups."""
    groups = [
        {
            "groupName": f"M{number}", "consumeType": "CONSUME_PASSIVELY",
            "messageModel": "CLUSTERING", "consumeFromWhere": "CONSUME_FROM_LAST_OFFSET",
            "subscriptionDataSet": [{"topic": "TopicT", "subString": "*", "subVersion": 1}],
        }
        for number in range(member_groups)
    ]  # fmt: skip
    body = {"clientID": client_id, "consumerDataSet": groups, "producerDataSet": []}
    return encode(RequestCode.HEART_BEAT, {}, json.dumps(body).encode())


def members() -> Iterable[bytes]:
    return (member_frame(f"m{number}") for number in range(HELD_CONNECTIONS))


def joins() -> Iterable[bytes]:
    """A client joins many groups and leaves them again: the other members are notified."""
    yield member_frame("joins")
    for number in range(MEMBER_GROUPS):
        ext = {"clientID": "joins", "consumerGroup": f"M{number}"}
        yield encode(RequestCode.UNREGISTER_CLIENT, ext, b"")


def large_group() -> Iterable[bytes]:
    return (member_frame(f"m{number}", 1) for number in range(MEMBERS))


def comes_and_goes() -> Iterable[bytes]:
    """A client joins a large group and leaves it again: all other members are notified."""
    yield member_frame("joins", 1)
    ext = {"clientID": "joins", "consumerGroup": "M0"}
    yield encode(RequestCode.UNREGISTER_CLIENT, ext, b"")


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
    "waits": Attack(
        f"30 POPs, notifications and peeks of {QUEUES_WIDE:,} queues", waiting_pops, 30,
        before=wide_topics,
    ),
    "offsets": Attack(
        f"commit, clone, list and reset of offsets on {QUEUES_WIDE:,} queues", offset_changes, 4,
        before=wide_offsets,
    ),
    "deletions": Attack(
        f"deletions of a topic with {QUEUES_DELETED:,} queues", deletions, QUEUES_DELETED + 2
    ),
    "lists": Attack("20 lists of 2,000 topics in flight", topic_lists, 20),
    "heartbeats": Attack("1,000 heartbeats in flight", heartbeats, 1_000),
    "joins": Attack(
        f"a client that joins and leaves {MEMBER_GROUPS:,} groups of {HELD_CONNECTIONS} members",
        joins, 1, held=members,
    ),
    "members": Attack(
        f"10 clients that join and leave a group of {MEMBERS:,} members", comes_and_goes, 20,
        connections=10, held=large_group, held_connections=MEMBERS,
    ),
    "locks": Attack("locks of 10,000 queues", locks, 4, before=wide_topics),
}  # fmt: skip


def main(port: int, name: str, seconds: float) -> None:
    attack = ATTACKS[name]
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        for frame in (send_frame(1), *attack.before()):
            connection.sendall(frame)
            read_frame(connection)
    held, holders = list(attack.held()), []
    for number in range(attack.held_connections if held else 0):
        holders.append(socket.create_connection(("127.0.0.1", port)))
        holders[-1].sendall(b"".join(held[number :: attack.held_connections]))
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
