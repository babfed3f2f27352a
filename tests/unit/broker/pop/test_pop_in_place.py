"""POP requests that are handled in place, against the rules: the same requests at two brokers.

One broker serves them as a server does, the other lets the router handle all of them. Responses,
the log (checkpoints and acks included), offsets and counters are the same at any time.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.rpc.answers import Answer, Reply, Suspend
from penstock.wire.bodies.client_bodies import TopicConfig
from penstock.wire.codes import CUT_CODES, RequestCode
from penstock.wire.frame import BINARY, JSON
from penstock.wire.output import encode
from tests.depth import rounds
from tests.unit.broker.broker_kit import NOW_MS, BrokerFixture
from tests.unit.broker.pop.pop_kit import (
    REVIVE,
    PopClient,
    Popped,
    advance,
    serve_by_rules,
    stored,
)

QUEUES = 3
TOPIC = TopicConfig(topic_name="T", read_queue_nums=QUEUES, write_queue_nums=QUEUES)
HEADER_CODES = {code: cut for cut, code in CUT_CODES.items()}
encodings = st.sampled_from([JSON, BINARY])
TIMES_MS = st.sampled_from([0, 500, 10_000, 45_000])
ODD_POPS: list[dict[str, Any]] = [
    {"queueId": 3}, {"queueId": -2}, {"queueId": "x"}, {"queueId": 1 << 31}, {"queueId": None},
    {"maxMsgNums": 0}, {"maxMsgNums": 33}, {"maxMsgNums": -(1 << 31)}, {"maxMsgNums": "1 "},
    {"invisibleTime": -1}, {"invisibleTime": 259_200_001}, {"invisibleTime": None},
    {"bornTime": 0}, {"bornTime": None}, {"bornTime": NOW_MS - 600_000}, {"bornTime": ""},
    {"pollTime": -1}, {"pollTime": "9223372036854775807"}, {"pollTime": None},
    {"initMode": None}, {"initMode": 7}, {"initMode": 1 << 40},
    {"topic": "U"}, {"topic": "TBW102"}, {"topic": REVIVE}, {"topic": None},
    {"consumerGroup": "H"}, {"consumerGroup": "not allowed!"}, {"consumerGroup": None},
    {"expType": "SQL92", "exp": "TAGS = 'a'"}, {"expType": "SQL92", "exp": "a ="},
    {"expType": "", "exp": "b"}, {"expType": "TAG"}, {"exp": "a||b"}, {"exp": "z"},
    {"order": "TRUE", "attemptId": "1"}, {"order": "yes"}, {"attemptId": "2"},
]  # fmt: skip
ODD_RECEIPTS: list[tuple[str, dict[str, Any]]] = [
    ("", {"offset": None}), ("", {"offset": "1x"}), ("", {"offset": -1}), ("", {"offset": 999}),
    ("", {"extraInfo": None}), ("", {"extraInfo": "1 2 3"}), ("", {"topic": "U"}),
    ("", {"topic": REVIVE}), ("", {"queueId": 99}), ("", {"queueId": "1x"}),
    ("", {"consumerGroup": None}), ("", {"consumerGroup": "H"}), (" ", {}), (" 7", {}), (" x", {}),
    ("x", {}), ("9" * 30, {}), (" " + "1" * 1100, {}), ("é", {}),
]  # fmt: skip


def request(
    env: BrokerFixture, code: int, ext: dict[str, Any], encoding: int, body: bytes = b""
) -> Answer:
    """The answer to a request; its fields without a value are left out."""
    if encoding == BINARY:
        code = HEADER_CODES[code]
    named = {name: str(value) for name, value in ext.items() if value is not None}
    return env.frame(encode(code, named, body, opaque=9, encoding=encoding, version=493))


class Machine(RuleBasedStateMachine):
    """Two brokers that get the same requests."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(prefix="penstock-pop-")
        root = Path(self.folder.name)
        self.env, self.ruled = BrokerFixture(root / "a"), BrokerFixture(root / "b")
        serve_by_rules(self.ruled)
        self.popped: list[Popped] = []
        self.sent = 0

    def both(self, act: Callable[[BrokerFixture], Answer]) -> Answer:
        """Do something with both brokers; the answer, which is the same."""
        first, second = act(self.env), act(self.ruled)
        if isinstance(first, Suspend):
            assert isinstance(second, Suspend)
            assert first.deadline_ms == second.deadline_ms
        else:
            assert first == second
        return first

    def each(self, act: Callable[[BrokerFixture], object]) -> None:
        for env in (self.env, self.ruled):
            act(env)

    @initialize(percent=st.sampled_from([0, 50, 100]), limited=st.booleans(), v2=st.booleans())
    def begin(self, percent: int, limited: bool, v2: bool) -> None:
        self.each(lambda env: env.context.topics.put(TOPIC, NOW_MS))
        self.each(
            lambda env: change_settings(
                env,
                pop_retry_percent=percent,
                pop_in_flight_limited=limited,
                pop_in_flight_max=4,
                pop_retry_topic_v2=v2,
                pop_retry_topic_v1_read=True,
            )
        )
        for queue_id in range(QUEUES):
            self.send(queue_id, 1, "a")
        self.odd_pop({}, JSON)

    # --- requests

    @rule(queue_id=st.integers(0, QUEUES - 1), count=st.integers(1, 12), tag=st.sampled_from("ab"))
    def send(self, queue_id: int, count: int, tag: str) -> None:
        frames = b"".join(
            self.env.send_frame(body=b"%d" % (self.sent + number), queue_id=queue_id, tag=tag)
            for number in range(count)
        )
        self.sent += count
        self.each(lambda env: env.many(frames))

    @rule(
        count=st.integers(1, 9),
        invisible_ms=TIMES_MS,
        queue_id=st.sampled_from([-1, -1, -1, 0, 1]),
        mode=st.integers(0, 1),
        tags=st.sampled_from(["*", "*", "a"]),
        encoding=encodings,
        times=st.integers(2, 4),
        sent_to=st.integers(0, QUEUES - 1),
    )
    def pop(
        self,
        count: int,
        invisible_ms: int,
        queue_id: int,
        mode: int,
        tags: str,
        encoding: int,
        times: int,
        sent_to: int,
    ) -> None:
        self.send(sent_to, 9, "a")
        fields = self.pop_fields() | {
            "queueId": queue_id, "maxMsgNums": count, "invisibleTime": invisible_ms,
            "initMode": mode, "exp": tags,
        }  # fmt: skip
        for _ in range(times):
            answer = self.both(lambda env: request(env, RequestCode.POP_MESSAGE, fields, encoding))
            if isinstance(answer, Reply) and answer.code == 0:
                self.popped += PopClient(self.env).read(answer)

    def pop_fields(self) -> dict[str, Any]:
        return {
            "consumerGroup": "G", "topic": "T", "queueId": -1, "maxMsgNums": 2,
            "invisibleTime": 10_000, "pollTime": 0, "bornTime": self.env.now_ms, "initMode": 0,
            "order": "false",
        }  # fmt: skip

    @rule(odd=st.sampled_from(ODD_POPS), encoding=encodings)
    def odd_pop(self, odd: dict[str, Any], encoding: int) -> None:
        fields = self.pop_fields() | odd
        self.both(lambda env: request(env, RequestCode.POP_MESSAGE, fields, encoding))

    @rule(wait_ms=st.sampled_from([1_000, 20_000]))
    def wait(self, wait_ms: int) -> None:
        self.both(lambda env: PopClient(env).ask(pollTime=wait_ms))

    @precondition(lambda self: self.popped)
    @rule(
        data=st.data(),
        invisible_ms=st.sampled_from([None, None, 0, 30_000, -1, 259_200_001, "x"]),
        encoding=encodings,
    )
    def ack_or_change(
        self, data: st.DataObject, invisible_ms: int | str | None, encoding: int
    ) -> None:
        for popped in data.draw(st.lists(st.sampled_from(self.popped), min_size=2, max_size=5)):
            fields: dict[str, Any] = {**PopClient(self.env).named(popped.receipt)}
            self.acknowledge(fields, invisible_ms, encoding)

    @precondition(lambda self: self.popped)
    @rule(data=st.data(), odd=st.sampled_from(ODD_RECEIPTS), change=st.booleans())
    def odd_receipt(
        self, data: st.DataObject, odd: tuple[str, dict[str, Any]], change: bool
    ) -> None:
        popped = data.draw(st.sampled_from(self.popped))
        named = PopClient(self.env).named(popped.receipt)
        fields = named | {"extraInfo": named["extraInfo"] + odd[0]} | odd[1]
        self.acknowledge(fields, 30_000 if change else None, JSON)

    def acknowledge(
        self, fields: dict[str, Any], invisible_ms: int | str | None, encoding: int
    ) -> None:
        code = RequestCode.ACK_MESSAGE
        if invisible_ms is not None:
            code = RequestCode.CHANGE_MESSAGE_INVISIBLETIME
            fields["invisibleTime"] = invisible_ms
        self.both(lambda env: request(env, code, fields, encoding))

    @precondition(lambda self: self.popped)
    @rule(data=st.data())
    def ack_several(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(self.popped), max_size=5, unique_by=id))
        self.both(lambda env: PopClient(env).ack_batch(chosen))

    # --- what ends a usual request

    @rule(ms=st.sampled_from([1, 100, 3_000, 10_001, 60_000]))
    def time_passes(self, ms: int) -> None:
        self.each(lambda env: advance(env, ms))

    @rule(change=st.sampled_from(["topic", "queues", "group", "read", "reset", "limits", "delete"]))
    def disturb(self, change: str) -> None:
        """Change something for two pops and an ack."""
        self.each(lambda env: disturbed(env, change, True))
        for _ in range(2):
            self.odd_pop({"maxMsgNums": 1}, JSON)
        if self.popped:
            fields: dict[str, Any] = {**PopClient(self.env).named(self.popped[-1].receipt)}
            self.acknowledge(fields, None, JSON)
        self.each(lambda env: disturbed(env, change, False))

    # --- the same state

    @invariant()
    def state_is_the_same(self) -> None:
        assert state(self.env) == state(self.ruled)

    def teardown(self) -> None:
        try:
            for name in self.env.store.queues.topics:
                for queue in self.env.store.queues.of(name):
                    place = (name.decode(), queue.queue_id)
                    assert stored(self.env, *place) == stored(self.ruled, *place)
        finally:
            self.env.close()
            self.ruled.close()
            self.folder.cleanup()


def disturbed(env: BrokerFixture, change: str, on: bool) -> None:
    """Change what usual requests depend on, or change it back."""
    context, now_ms = env.context, env.now_ms
    if change in ("topic", "queues"):
        queues = QUEUES - 1 if on and change == "queues" else QUEUES
        perm = 2 if on and change == "topic" else 6
        config = TopicConfig(
            topic_name="T", read_queue_nums=queues, write_queue_nums=QUEUES, perm=perm
        )
        context.topics.put(config, now_ms)
    elif change == "group":
        group = context.groups.find("G", now_ms)
        context.groups.put(msgspec.structs.replace(group, consume_enable=not on), now_ms)
    elif change == "read":
        context.groups.allow_reading("G", "T", allowed=not on, now_ms=now_ms)
    elif change == "reset" and on:
        context.offsets.reset("G", "T", {0: 1}, now_ms)
    elif change == "limits":
        change_settings(
            env, pop_batches_max=2 if on else 1_000, pull_bytes_max=300 if on else 9_999
        )
    elif change == "delete" and on:
        env.ask(RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": "T"})
        context.topics.put(TOPIC, now_ms)


def change_settings(env: BrokerFixture, **changes: Any) -> None:
    broker = msgspec.structs.replace(env.live.current.broker, **changes)
    env.live.current = msgspec.structs.replace(env.live.current, broker=broker)


def state(env: BrokerFixture) -> dict[str, Any]:
    stats, revive_log = env.context.stats, env.broker.pop.revive_log
    return {
        "log": env.store.log.end,
        "offsets": env.context.offsets.table.body(),
        "in flight": revive_log.checkpoints.in_flight,
        "checkpoints": [
            (one.key, one.acked, one.due_ms, one.revive_offset, one.log_offset)
            for one in revive_log.checkpoints
        ],
        "entries": revive_log.writer.written,
        "due": env.broker.due(),
        "suspended": len(env.context.long_polling),
        "woken": env.woken,
        **{
            name: {key: (flow.nums, flow.times, flow.size) for key, flow in flows.items()}
            for name, flows in vars(stats).items()
            if name in ("groups", "acks", "batches")
        },
    }


TestInPlace = Machine.TestCase
TestInPlace.settings = settings(
    max_examples=rounds(ci=8, proof=400),
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
