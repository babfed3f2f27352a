"""Admin without servers: runtime information, versions, kinds, pages, plans."""

import asyncio
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.client.admin.admin_browse import Pulled, Span, read_page
from penstock.client.admin.admin_cluster import read_runtime_info
from penstock.client.admin.admin_core import AdminCore
from penstock.client.admin.admin_follow import Follower
from penstock.client.admin.admin_members import version_text
from penstock.client.admin.admin_topics import kind_of, read_pages
from penstock.client.admin.admin_values import (
    BrokerAddress,
    GroupProgress,
    MessagePage,
    QueueMove,
    QueueProgress,
    ResetPlan,
    TopicKind,
)
from penstock.client.admin.async_admin import AsyncAdmin
from penstock.client.consumer.subscription import Subscription
from penstock.errors import HeaderError, NoPermission, NoRoute, PeerUnreachable, SystemBusy
from penstock.testing.virtual_clock import VirtualClock
from penstock.transport.peer import Response
from penstock.wire import fastjson
from penstock.wire.bodies.client_bodies import (
    BrokerData,
    ClusterInfo,
    DataVersion,
    MessageQueue,
    TopicConfig,
)
from penstock.wire.bodies.table_bodies import TopicConfigSerializeWrapper
from penstock.wire.codes import V4_9_8, V5_0_0, V5_3_3, V5_4_0, RequestCode, ResponseCode
from tests.unit.client.consumer.consumer_kit import record

BROKER = BrokerAddress("C", "broker-a", 0, "127.0.0.1:10911")


# --- runtime information and names


def test_runtime_information_is_numbers_or_none() -> None:
    info = read_runtime_info(
        {
            "putTps": "12.5 3.0 1.0",
            "getTransferredTps": "what 1 2",
            "commitLogDiskRatio": "0.25",
            "msgPutTotalTodayNow": "130",
            "msgPutTotalTodayMorning": "100",
            "msgPutTotalYesterdayMorning": "60",
            "commitLogMinOffset": "-1",
            "brokerVersionDesc": "V5_4_0",
        }
    )
    assert info.put_tps == 12.5
    assert info.get_tps is None
    assert info.disk_used == 0.25
    assert (info.put_today, info.put_yesterday) == (30, 40)
    assert info.get_today is None
    assert info.log_begin is None
    assert info.version == "V5_4_0"
    assert info.penstock_version is None


@pytest.mark.parametrize(
    ("version", "text"),
    [
        (233, "4.1.0"),
        (V4_9_8, "4.9.8"),
        (V5_0_0, "5.0.0"),
        (V5_3_3, "5.3.3"),
        (V5_4_0, "5.4.0"),
        (V5_4_0 - 1, "5.4.0-SNAPSHOT"),
        (63, "before 4.1 (63)"),
    ],
)
def test_client_version_text(version: int, text: str) -> None:
    assert version_text(version) == text


def test_topic_kinds() -> None:
    own = {"DefaultCluster", "broker-a"}
    assert kind_of("orders", own) is TopicKind.NORMAL
    assert kind_of("%RETRY%billing", own) is TopicKind.RETRY
    assert kind_of("%DLQ%billing", own) is TopicKind.DLQ
    for name in ("TBW102", "broker-a", "DefaultCluster", "DefaultCluster_REPLY_TOPIC"):
        assert kind_of(name, own) is TopicKind.SYSTEM
    assert kind_of("rmq_sys_wheel_timer") is TopicKind.SYSTEM


# --- values


def at(committed: int | None, *, max_offset: int = 10, lag_ms: int | None = None) -> QueueProgress:
    return QueueProgress(MessageQueue("t", "b", 0), max_offset, committed, committed, lag_ms, None)


def test_unknown_lag_is_none_and_never_zero() -> None:
    assert at(None).lag is None
    assert at(4).lag == 6
    assert at(12).lag == 0  # the broker's end is older than the commit
    known = GroupProgress("g", (at(4, lag_ms=50), at(10, lag_ms=0)), 1.0)
    assert (known.lag, known.lag_ms) == (6, 50)
    for unknown in (
        GroupProgress("g", (at(4, lag_ms=50), at(None)), 1.0),
        GroupProgress("g", (at(4, lag_ms=50),), 1.0, ("broker-b",)),
    ):
        assert unknown.lag is None
        assert unknown.lag_ms is None


def test_reset_plan_counts_skipped_and_repeated_messages() -> None:
    queues = [MessageQueue("t", "b", number) for number in range(3)]
    plan = ResetPlan(
        "g", "t",
        (QueueMove(queues[0], 5, 9), QueueMove(queues[1], 5, 2), QueueMove(queues[2], None, 7)),
    )  # fmt: skip
    assert (plan.skipped, plan.repeated) == (4, 3)
    assert plan.moves[2].skipped is None


# --- asking brokers


class Core(AdminCore):
    """Brokers that answer from a script."""

    def __init__(self, answers: Mapping[str, Response | Exception]) -> None:
        super().__init__("127.0.0.1:1")
        self.answers = answers

    async def ask(self, address: str, code: int, *rest: Any, **more: Any) -> Response:
        answer = self.answers[address]
        if isinstance(answer, Exception):
            raise answer
        return answer


def broker(name: str) -> BrokerAddress:
    return BrokerAddress("C", name, 0, name)


def test_reading_continues_without_an_unreachable_broker() -> None:
    away = PeerUnreachable("refused", address="b")
    core = Core({"a": Response(), "b": away})
    found = asyncio.run(core.ask_each([broker("a"), broker("b")], 28))
    assert [b.name for b, _ in found.items] == ["a"]
    assert found.unreachable == ("b",)
    with pytest.raises(PeerUnreachable):
        asyncio.run(core.ask_each([broker("b")], 28))


def test_refusal_ends_following() -> None:
    core = Core({"a": Response(), "b": NoPermission("no")})
    with pytest.raises(NoPermission):
        asyncio.run(core.ask_each([broker("a"), broker("b")], 28))


def test_partially_failed_change_tells_where_it_was_made() -> None:
    core = Core({"a": Response(), "b": NoPermission("b: not you")})
    with pytest.raises(NoPermission, match="b: not you; changed on a"):
        asyncio.run(core.tell_each([broker("a"), broker("b")], 17))


class Names(AdminCore):
    """A NameServer that knows a cluster."""

    async def ask_nameserver(self, code: int, *rest: Any, **more: Any) -> Response:
        assert code == RequestCode.GET_BROKER_CLUSTER_INFO
        data = {
            name: BrokerData(cluster="C", broker_name=name, broker_addrs={0: f"{name}:1", 1: "s:1"})
            for name in ("b", "a")
        }
        info = ClusterInfo(broker_addr_table=data, cluster_addr_table={"C": ["b", "a", "gone"]})
        return Response(body=fastjson.encode(info))


def test_brokers_are_found_by_cluster_and_name() -> None:
    core = Names("127.0.0.1:1")
    assert [b.name for b in asyncio.run(core.masters())] == ["a", "b"]
    assert [b.name for b in asyncio.run(core.masters("C", ["b"]))] == ["b"]
    assert len(asyncio.run(core.brokers())) == 4
    assert asyncio.run(core.broker("a", 1)).address == "s:1"
    with pytest.raises(NoRoute, match=r"know no cluster 'D' \(clusters: C\)"):
        asyncio.run(core.masters("D"))
    with pytest.raises(NoRoute, match=r"no master x \(masters: a, b\)"):
        asyncio.run(core.masters(names=["a", "x"]))
    with pytest.raises(NoRoute, match="no broker a with the id 7"):
        asyncio.run(core.broker("a", 7))


class Pages(AdminCore):
    """A broker with a table that changes once while it is read."""

    def __init__(self, names: list[str], page: int, *, changes_at: int | None) -> None:
        super().__init__("127.0.0.1:1")
        self.names, self.page, self.changes_at = names, page, changes_at
        self.version = DataVersion(counter=1)
        self.requests = 0

    async def ask(self, address: str, code: int, *rest: Any, **more: Any) -> Response:
        fields = rest[0]
        self.requests += 1
        if self.requests == self.changes_at:
            self.version = DataVersion(counter=2)
        begin = int(fields["topicSeq"])
        if fields["dataVersion"]:
            given = fastjson.decode(fields["dataVersion"].encode(), DataVersion)
            begin = begin if given == self.version else 0
        chosen = self.names[begin : begin + self.page]
        body = TopicConfigSerializeWrapper(
            topic_config_table={name: TopicConfig(topic_name=name) for name in chosen},
            data_version=self.version,
        )
        return Response(ext={"totalTopicNum": str(len(self.names))}, body=fastjson.encode(body))


@pytest.mark.parametrize("changes_at", [None, 2, 3])
def test_large_table_is_read_in_pages(changes_at: int | None) -> None:
    names = [f"t{number}" for number in range(10)]
    core = Pages(names, 3, changes_at=changes_at)
    table = asyncio.run(
        read_pages(
            core, BROKER, RequestCode.GET_ALL_TOPIC_CONFIG, TopicConfigSerializeWrapper, "Topic",
            lambda page: (page.topic_config_table, page.data_version),
        )
    )  # fmt: skip
    assert sorted(table) == names


def test_a_table_that_changes_all_the_time_is_an_error() -> None:
    class Busy(Pages):
        async def ask(self, address: str, code: int, *rest: Any, **more: Any) -> Response:
            self.version = self.version.next(self.requests)
            return await super().ask(address, code, *rest, **more)

    with pytest.raises(SystemBusy, match="broker-a is not complete after 1000 pages"):
        asyncio.run(
            read_pages(
                Busy(["a", "b", "c"], 1, changes_at=None), BROKER,
                RequestCode.GET_ALL_TOPIC_CONFIG, TopicConfigSerializeWrapper, "Topic",
                lambda page: (page.topic_config_table, page.data_version),
            )
        )  # fmt: skip


# --- browsing


class Queues(AdminCore):
    """A broker with some queues: for each the first offset and the store times from there on."""

    def __init__(self, queues: Mapping[int, tuple[int, list[int]]], piece: int = 5) -> None:
        super().__init__("127.0.0.1:1")
        self.queues, self.piece = queues, piece
        session: Any = self.session
        session.address_of = lambda name: name
        session.broker = lambda name: SimpleNamespace(address=name)

    async def ask(self, address: str, code: int, *rest: Any, **more: Any) -> Response:
        fields = rest[0]
        number = int(fields["queueId"])
        first, times = self.queues[number]
        end = first + len(times)
        if code == RequestCode.GET_MIN_OFFSET:
            return Response(ext={"offset": str(first)})
        if code == RequestCode.GET_MAX_OFFSET:
            return Response(ext={"offset": str(end)})
        if code == RequestCode.SEARCH_OFFSET_BY_TIMESTAMP:
            before = sum(time < int(fields["timestamp"]) for time in times)
            return Response(ext={"offset": str(first + before)})
        assert code == RequestCode.PULL_MESSAGE
        begin = int(fields["queueOffset"])
        answer, following = ResponseCode.SUCCESS, begin
        if begin < first or begin > end:
            answer, following = ResponseCode.PULL_OFFSET_MOVED, first if begin < first else end
        elif begin == end:
            answer = ResponseCode.PULL_NOT_FOUND
        else:
            following = min(begin + self.piece, begin + int(fields["maxMsgNums"]), end)
        body = b"".join(
            record(offset, b"%d-%d" % (number, offset), queue_id=number,
                   store_ms=times[offset - first], topic="t")
            for offset in range(begin, following)
            if answer == ResponseCode.SUCCESS
        )  # fmt: skip
        numbers = {"nextBeginOffset": following, "minOffset": first, "maxOffset": end}
        return Response(int(answer), {k: str(v) for k, v in numbers.items()}, body)


async def page_after_page(core: Queues, span: Span, count_max: int) -> list[MessagePage]:
    queues = [MessageQueue("t", "broker-a", number) for number in core.queues]
    pages: list[MessagePage] = []
    resume = None
    while True:
        page = await read_page(core, queues, Subscription("t"), span, count_max, resume)
        pages.append(page)
        if page.resume is None:
            return pages
        resume = dict(page.resume)


TIMES = st.lists(st.integers(0, 30), max_size=80).map(sorted)


@given(
    queues=st.lists(st.tuples(st.sampled_from([0, 3, 50]), TIMES), min_size=1, max_size=4),
    piece=st.sampled_from([1, 5, 40]),
    count_max=st.integers(1, 40),
    since=st.none() | st.integers(0, 31),
    until=st.none() | st.integers(0, 31),
    newest_first=st.booleans(),
)
def test_pages_have_every_message_of_the_span_once_by_time(
    queues: list[tuple[int, list[int]]], piece: int, count_max: int, since: int | None,
    until: int | None, newest_first: bool,
) -> None:  # fmt: skip
    core = Queues(dict(enumerate(queues)), piece)
    pages = asyncio.run(page_after_page(core, Span(since, until, newest_first), count_max))
    assert all(len(page.messages) <= count_max for page in pages)
    messages = [message for page in pages for message in page.messages]
    wanted = {
        (number, first + place)
        for number, (first, times) in enumerate(queues)
        for place, time in enumerate(times)
        if (since is None or time >= since) and (until is None or time <= until)
    }
    found = [(message.queue_id, message.queue_offset) for message in messages]
    assert len(found) == len(wanted)
    assert set(found) == wanted
    times = [message.store_ms for message in messages]
    assert times == sorted(times, reverse=newest_first)


def test_pull_response_without_offsets_is_refused() -> None:
    class Broken(Queues):
        async def ask(self, address: str, code: int, *rest: Any, **more: Any) -> Response:
            if code != RequestCode.PULL_MESSAGE:
                return await super().ask(address, code, *rest, **more)
            return Response(ext={"nextBeginOffset": "7", "minOffset": "0"})

    with pytest.raises(HeaderError, match="maxOffset"):
        asyncio.run(page_after_page(Broken({0: (0, [1])}), Span(None, None, False), 10))


# --- changes at several brokers


class Scripted(AsyncAdmin):
    """Two masters and the values of a NameServer; `refuse` has the requests that fail."""

    def __init__(self, refuse: Mapping[tuple[str, int], Exception] | None = None) -> None:
        super().__init__("127.0.0.1:1")
        self.refuse = refuse or {}
        self.requests: list[tuple[str, int]] = []
        self.values: dict[str, str] = {}
        self.known = [BrokerAddress("C", "a", 0, "a"), BrokerAddress("D", "b", 0, "b")]
        self.bodies: dict[int, bytes] = {}

    async def brokers(self, cluster: str | None = None) -> list[BrokerAddress]:
        return [broker for broker in self.known if cluster in (None, broker.cluster)]

    async def ask(self, address: str, code: int, *rest: Any, **more: Any) -> Response:
        self.requests.append((address, code))
        failure = self.refuse.get((address, code))
        if failure is not None:
            raise failure
        return Response(body=self.bodies.get(code, b"{}"))

    async def kv(self, namespace: str, key: str) -> str | None:
        return self.values.get(key)

    async def put_kv(self, namespace: str, key: str, value: str) -> None:
        self.values[key] = value

    async def delete_kv(self, namespace: str, key: str) -> None:
        del self.values[key]

    async def _await_route(self, *route: Any) -> None:
        pass


def test_create_tells_on_which_brokers_it_succeeded() -> None:
    for code, make in (
        (RequestCode.UPDATE_AND_CREATE_TOPIC, Scripted.create_topic),
        (RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, Scripted.create_group),
    ):
        admin = Scripted({("a", code): NoPermission("a: not you")})
        with pytest.raises(NoPermission, match="a: not you; changed on b"):
            asyncio.run(make(admin, "new"))
        assert ("b", code) in admin.requests


def test_order_configuration_of_other_clusters_and_brokers_is_kept() -> None:
    async def check() -> None:
        admin = Scripted()
        await admin.create_topic("t", queues=4, order=True)
        assert admin.values == {"t": "a:4;b:4"}
        await admin.create_topic("t", queues=2, order=True, cluster="D")
        assert admin.values == {"t": "a:4;b:2"}
        await admin.create_topic("t", order=False, brokers=["b"])
        assert admin.values == {"t": "a:4"}
        await admin.create_topic("t", queues=4, order=True)
        with patch.object(type(admin.session.nameservers), "call_all", nothing):
            await admin.delete_topic("t", cluster="C")
            assert admin.values == {"t": "b:4"}
            await admin.delete_topic("t")
        assert admin.values == {}

    asyncio.run(check())


async def nothing(*arguments: Any) -> None:
    pass


def test_unknown_message_is_distinguished_from_a_missing_one() -> None:
    away = PeerUnreachable("refused", address="b")

    async def check() -> None:
        admin = Scripted({("b", RequestCode.VIEW_MESSAGE_BY_ID): away})
        admin.bodies = {RequestCode.VIEW_MESSAGE_BY_ID: b""}
        with pytest.raises(PeerUnreachable):
            await admin.message_by_offset_id("7F00000100002A9F0000000000000000")

    asyncio.run(check())


def test_lag_is_unknown_if_a_master_is_down() -> None:
    admin = Scripted()
    admin.known += [BrokerAddress("C", "c", 1, "c")]
    assert asyncio.run(admin.brokers_without_master()) == ("c",)
    progress = asyncio.run(admin.progress("g"))
    assert progress.unreachable == ("c",)
    assert progress.lag is None


# --- following


class View:
    """Queues that can be read unless they are in `away`."""

    def __init__(self) -> None:
        self.away: set[MessageQueue] = set()
        self.starts: list[tuple[str, MessageQueue]] = []

    async def check_filter(self, wanted: Subscription) -> None:
        pass

    async def max_offset(self, queue: MessageQueue) -> int:
        return self._start("max", queue)

    async def offset_at(self, queue: MessageQueue, at_ms: int) -> int:
        return self._start("time", queue)

    def _start(self, how: str, queue: MessageQueue) -> int:
        if queue in self.away:
            raise PeerUnreachable("refused", address=queue.broker_name)
        self.starts.append((how, queue))
        return 7

    async def pull(self, queue: MessageQueue, offset: int, *rest: Any, **more: Any) -> Pulled:
        assert offset == 7
        await asyncio.Event().wait()
        raise AssertionError


async def run_pending() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_queues_added_later_start_like_the_others() -> None:
    here, away, new = (MessageQueue("t", name, 0) for name in ("a", "b", "c"))

    async def check() -> None:
        clock = VirtualClock()
        route = SimpleNamespace(read_queues=[here, away])

        async def find_route(topic: str) -> SimpleNamespace:
            return route

        options = SimpleNamespace(route_refresh_ms=30_000, namespace="")
        session = SimpleNamespace(
            clock=clock, route=find_route, find_route=find_route, options=options
        )
        core = AdminCore("127.0.0.1:1")
        core.session = session  # type: ignore[assignment]
        follower = Follower(core, Subscription("t"), "last", "g")
        view = View()
        view.away = {away}
        follower._view = view  # type: ignore[assignment]
        messages = follower.messages()
        first = asyncio.ensure_future(anext(messages))
        await run_pending()
        assert view.starts == [("max", here)]
        view.away = set()
        route.read_queues = [here, away, new]
        for _ in range(2):
            clock.advance(30_000)
            await run_pending()
        assert view.starts == [("max", here), ("time", away), ("time", new)]
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        view.away = {here, away, new}
        with pytest.raises(PeerUnreachable):
            await anext(follower.messages())

    asyncio.run(check())
