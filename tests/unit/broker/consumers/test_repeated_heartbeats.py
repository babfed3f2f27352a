"""Heartbeats that repeat the last one have the effect of any other: two brokers get the same ones,
and one of them takes each for a new one."""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from penstock.broker.consumers import heartbeats
from penstock.broker.consumers.heartbeats import HeartbeatHandlers
from penstock.broker.filter.filters import Filters
from penstock.rpc.answers import Answer
from penstock.rpc.command import Command
from penstock.wire import fastjson
from penstock.wire.bodies.client_bodies import (
    ConsumerData,
    HeartbeatData,
    ProducerData,
    SubscriptionGroupConfig,
)
from tests.depth import rounds
from tests.unit.broker.consumers.membership_kit import (
    NOW_MS,
    ConsumerFixture,
    change,
    consumer,
    make_fixture,
)

HEARTBEAT = 34
CLIENTS = st.integers(1, 3)
GROUPS = st.sampled_from(["g", "h"])


class Handlers(HeartbeatHandlers):
    """Counts the heartbeats that were not decoded; takes none for a repeated one if told so."""

    def __init__(self, fixture: ConsumerFixture, *, repeats: bool = True) -> None:
        super().__init__(fixture.live, fixture.clients, fixture.groups, fixture.topics, Filters())
        self.repeats = repeats
        self.renewed = 0

    def _renew(self, *given: Any) -> bool:
        renewed = self.repeats and super()._renew(*given)
        self.renewed += renewed
        return renewed


def opened(root: Path, *, repeats: bool = True) -> tuple[ConsumerFixture, Handlers]:
    fixture = make_fixture(root)
    handlers = Handlers(fixture, repeats=repeats)
    fixture.serve(handlers)
    return fixture, handlers


def command(body: bytes, client: int, now_ms: int, **fields: Any) -> Command:
    made = Command(
        HEARTBEAT, {}, body, client=client, peer=fields.pop("peer", f"10.0.0.{client}:99"),
        now_ms=now_ms, version=fields.pop("version", 479), language=fields.pop("language", 0),
    )  # fmt: skip
    made.user = fields.pop("user", "")
    assert not fields
    return made


def beat(client_id: str, *consumers: ConsumerData, producers: tuple[str, ...] = ()) -> bytes:
    return fastjson.encode(
        HeartbeatData(
            client_id=client_id,
            consumer_data_set=list(consumers),
            producer_data_set=[ProducerData(group_name=name) for name in producers],
        )
    )


def state(fixture: ConsumerFixture) -> dict[str, Any]:
    clients = fixture.clients
    return {
        "groups": {
            group.name: (
                group.consume_type, group.message_model, group.consume_from_where,
                group.subscriptions, group.memory, group.client_ids(), group.owners, group.members,
            )
            for group in clients.consumer_groups()
        },
        "producers": clients.producer_groups(),
        "by id": [clients.find_producer(f"c{number}") for number in range(4)],
        "seen": list(clients._seen_ms.items()),
        "due": clients.due(),
        "configs": sorted(fixture.groups.table.groups),
        "topics": sorted(fixture.topics.table.topics),
    }  # fmt: skip


class Machine(RuleBasedStateMachine):
    """Two brokers, and clients that send the same heartbeat again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(prefix="penstock-heartbeats-")
        root = Path(self.folder.name)
        self.fixture, self.handlers = opened(root / "a")
        self.plain, _ = opened(root / "b", repeats=False)
        self.now_ms = NOW_MS
        self.last: dict[int, tuple[bytes, dict[str, Any]]] = {}

    def both(self, act: Callable[[ConsumerFixture], object]) -> None:
        """Do the same with both, with the same result, effects and state."""
        assert act(self.fixture) == act(self.plain)
        effects = [
            [(type(effect), getattr(effect, "group", "")) for effect in fixture.effects.take()]
            for fixture in (self.fixture, self.plain)
        ]
        assert effects[0] == effects[1]
        assert state(self.fixture) == state(self.plain)

    def send(self, client: int) -> None:
        body, fields = self.last[client]

        def send(fixture: ConsumerFixture) -> Answer:
            return fixture.router.handle(command(body, client, self.now_ms, **fields))

        self.both(send)

    @initialize()
    def begin(self) -> None:
        self.last[1] = beat("c1", consumer("g", "T", "U"), producers=("p",)), {}
        self.send(1)

    @rule(
        client=CLIENTS,
        consumers=st.lists(
            st.builds(
                lambda group, topics, version, model: consumer(
                    group, *topics, version=version, message_model=model
                ),
                GROUPS,
                st.sets(st.sampled_from("TUV"), max_size=3),
                st.integers(1, 3),
                st.sampled_from(["CLUSTERING", "BROADCASTING"]),
            ),
            min_size=1,
            max_size=2,
        ),
        producers=st.sets(st.sampled_from(["p", "q", ""]), max_size=2),
        same_id=st.booleans(),
        fields=st.fixed_dictionaries(
            {},
            optional={"user": st.sampled_from(["", "u"]), "version": st.sampled_from([479, 480])},
        ),
    )
    def heartbeat(
        self,
        client: int,
        consumers: list[ConsumerData],
        producers: set[str],
        same_id: bool,
        fields: dict[str, Any],
    ) -> None:
        name = "c0" if same_id else f"c{client}"
        self.last[client] = beat(name, *consumers, producers=tuple(sorted(producers))), fields
        self.send(client)

    @rule(ms=st.sampled_from([1, 30_000]))
    def all_repeat(self, ms: int) -> None:
        for _ in range(2):
            self.now_ms += ms
            for client in self.last:
                self.send(client)

    @rule(client=CLIENTS, ms=st.sampled_from([0, 5_000]))
    def one_repeats(self, client: int, ms: int) -> None:
        self.now_ms += ms
        if client in self.last:
            self.send(client)

    @rule(client=CLIENTS)
    def disconnect(self, client: int) -> None:
        self.both(lambda fixture: fixture.clients.disconnected(client))

    @rule(client=CLIENTS, producers=st.sampled_from(["", "p", "q"]), consumers=GROUPS)
    def leave(self, client: int, producers: str, consumers: str) -> None:
        self.both(lambda fixture: fixture.clients.unregister(client, producers, consumers))

    @rule(ms=st.sampled_from([60_000, 121_000]))
    def expire(self, ms: int) -> None:
        self.now_ms += ms
        self.both(lambda fixture: fixture.clients.tick(self.now_ms))

    @rule(group=GROUPS)
    def delete_group(self, group: str) -> None:
        self.both(lambda fixture: fixture.groups.delete(group, self.now_ms))

    @rule(group=GROUPS)
    def delete_retry_topic(self, group: str) -> None:
        self.both(lambda fixture: len(list(fixture.topics.delete(f"%RETRY%{group}", self.now_ms))))

    @rule(allowed=st.booleans())
    def allow_new_groups(self, allowed: bool) -> None:
        for fixture in (self.fixture, self.plain):
            change(fixture.live, auto_create_groups=allowed)

    @rule(step_ms=st.sampled_from([-5_000, 5_000]))
    def set_clock(self, step_ms: int) -> None:
        self.now_ms += step_ms
        self.both(lambda fixture: fixture.clients.clock_stepped(step_ms))

    def teardown(self) -> None:
        self.fixture.store.close()
        self.plain.store.close()
        self.folder.cleanup()


TestRepeats = Machine.TestCase
TestRepeats.settings = settings(
    max_examples=rounds(ci=60, proof=1_000),
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


# --- what is taken for a repeated heartbeat


@pytest.fixture
def env(tmp_path: Path) -> Iterator[tuple[ConsumerFixture, Handlers]]:
    fixture, handlers = opened(tmp_path)
    yield fixture, handlers
    fixture.store.close()


BODY = beat("c1", consumer("g", "T", "U"), producers=("p", "q"))


def test_the_same_body_renews_the_memberships(env: tuple[ConsumerFixture, Handlers]) -> None:
    fixture, handlers = env
    first = fixture.ask(HEARTBEAT, BODY)
    expire_ms = fixture.live.current.broker.client_expire_ms
    for number in range(1, 5):
        assert fixture.ask(HEARTBEAT, BODY, now_ms=NOW_MS + number * expire_ms // 2) == first
        fixture.clients.tick(NOW_MS + number * expire_ms // 2)
    assert handlers.renewed == 4
    assert fixture.clients.due() == NOW_MS + 3 * expire_ms
    fixture.clients.tick(NOW_MS + 3 * expire_ms)
    assert fixture.clients.consumer_group("g") is None
    assert fixture.clients.producers("p") == []


@pytest.mark.parametrize(
    "other",
    [
        {"peer": "10.0.0.9:9"},
        {"version": 480},
        {"language": 1},
        {"user": "u"},
    ],
)
def test_the_same_body_with_another_header_is_applied(
    env: tuple[ConsumerFixture, Handlers], other: dict[str, Any]
) -> None:
    fixture, handlers = env
    fixture.router.handle(command(BODY, 1, NOW_MS))
    fixture.router.handle(command(BODY, 1, NOW_MS, **other))
    assert handlers.renewed == 0
    (member,) = fixture.clients.producers("p")
    given = {"peer": member.address, "version": member.version, "language": member.language}
    assert (given | {"user": member.user}).items() >= other.items()


@pytest.mark.parametrize("version", [1, 7])
def test_subscriptions_that_another_member_changed_are_set_again(
    env: tuple[ConsumerFixture, Handlers], version: int
) -> None:
    fixture, handlers = env
    other = beat("c2", consumer("g", "T", version=version))
    fixture.ask(HEARTBEAT, BODY)
    fixture.ask(HEARTBEAT, other, client=2)
    group = fixture.clients.consumer_group("g")
    assert group is not None
    assert set(group.subscriptions) == {"T"}
    fixture.ask(HEARTBEAT, BODY)
    assert set(group.subscriptions) == {"T", "U"}
    assert group.subscriptions["T"].sub_version == version
    assert handlers.renewed == 0


def test_a_heartbeat_with_a_group_twice_is_applied_each_time(
    env: tuple[ConsumerFixture, Handlers],
) -> None:
    fixture, handlers = env
    body = beat("c1", consumer("g", "T"), consumer("g", "U"))
    for _ in range(3):
        fixture.ask(HEARTBEAT, body)
    assert handlers.renewed == 0


def test_deleted_groups_and_retry_topics_are_created_again(
    env: tuple[ConsumerFixture, Handlers],
) -> None:
    fixture, handlers = env
    fixture.ask(HEARTBEAT, BODY)
    fixture.groups.delete("g", NOW_MS)
    fixture.ask(HEARTBEAT, BODY)
    assert fixture.groups.get("g") == SubscriptionGroupConfig(group_name="g")
    assert list(fixture.topics.delete("%RETRY%g", NOW_MS)) is not None
    fixture.ask(HEARTBEAT, BODY)
    assert fixture.topics.get("%RETRY%g") is not None
    assert handlers.renewed == 0
    fixture.ask(HEARTBEAT, BODY)
    assert handlers.renewed == 1


def test_a_heartbeat_that_was_refused_for_a_group_is_applied_again(
    env: tuple[ConsumerFixture, Handlers], monkeypatch: pytest.MonkeyPatch
) -> None:
    fixture, handlers = env
    change(fixture.live, auto_create_groups=False)
    fixture.ask(HEARTBEAT, BODY)
    fixture.ask(HEARTBEAT, BODY)
    assert fixture.clients.consumer_group("g") is None
    change(fixture.live, auto_create_groups=True)
    fixture.ask(HEARTBEAT, BODY)
    assert fixture.clients.consumer_group("g") is not None
    monkeypatch.setattr(heartbeats, "GROUPS_PER_STEP", 1)
    assert handlers.renewed == 0
    fixture.ask(HEARTBEAT, BODY)
    assert handlers.renewed == 1
