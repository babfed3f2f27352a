"""The session under all clients: NameServers with failover, routes, heartbeats, requests."""

import asyncio
import http.client
import http.server
import itertools
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import pytest

from penstock.client.client_options import ClientKeywords, ClientOptions
from penstock.client.client_session import MemberResponse, Session
from penstock.client.topic_routes import Route
from penstock.errors import ClientClosed, ClientForked, NoNameServer, NoPermission, NoRoute
from penstock.testing.virtual_clock import VirtualClock
from penstock.transport.peer import PeerRequest, Response
from penstock.wire import fastjson
from penstock.wire.bodies.client_bodies import (
    BrokerData,
    ConsumerData,
    HeartbeatData,
    ProducerData,
    QueueData,
    TopicList,
    TopicRouteData,
)
from penstock.wire.codes import RequestCode
from tests.integration.loops import Frame, Run, Server, Wire, run, serving

__all__ = ["run"]

DEAD = "127.0.0.1:1"


class FakeCluster:
    """A NameServer and a broker that record their requests."""

    def __init__(self, topics: Iterable[str] = ("Orders",)) -> None:
        self.topics = set(topics)
        self.requests: list[Frame] = []
        self.heard = asyncio.Event()
        self.broker = ""
        self.replica = ""
        self.queues = 4
        self.wire: Wire | None = None
        self.answers: asyncio.Queue[Frame] = asyncio.Queue()

    async def names(self, wire: Wire) -> None:
        while True:
            frame = await wire.read()
            self.requests.append(frame)
            if frame.code == RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER:
                wire.answer(frame, body=fastjson.encode(TopicList(topic_list=sorted(self.topics))))
            elif frame.ext["topic"] in self.topics:
                wire.answer(frame, body=fastjson.encode_strict(self._route()))
            else:
                wire.answer(frame, 17, remark="no such topic")

    def _route(self) -> TopicRouteData:
        addresses = {0: self.broker} | ({1: self.replica} if self.replica else {})
        return TopicRouteData(
            queue_datas=[
                QueueData(broker_name="a", read_queue_nums=4, write_queue_nums=self.queues, perm=6)
            ],
            broker_datas=[BrokerData(broker_name="a", broker_addrs=addresses)],
        )

    async def serve_broker(self, wire: Wire) -> None:
        self.wire = wire
        while True:
            frame = await wire.read()
            if frame.flag & 1:
                self.answers.put_nowait(frame)
                continue
            self.requests.append(frame)
            self.heard.set()
            if frame.code == RequestCode.GET_MAX_OFFSET:
                wire.answer(frame, 16, remark="not you")
            else:
                wire.answer(frame)

    def beats(self) -> list[HeartbeatData]:
        beats = [frame for frame in self.requests if frame.code == RequestCode.HEART_BEAT]
        return [fastjson.decode(frame.body, HeartbeatData) for frame in beats]

    def count(self, code: int) -> int:
        return sum(frame.code == code for frame in self.requests)


class Group:
    """A member that answers one request code."""

    def __init__(
        self, answer: MemberResponse | bool = False, topics: Iterable[str] = ("Orders",)
    ) -> None:
        self.answer = answer
        self._topics = topics
        self.routes: list[Route] = []

    def producers(self) -> Iterable[ProducerData]:
        return [ProducerData(group_name="senders")]

    def consumers(self) -> Iterable[ConsumerData]:
        return [ConsumerData(group_name="readers")]

    def topics(self) -> Iterable[str]:
        return self._topics

    def route_changed(self, route: Route) -> None:
        self.routes.append(route)

    def handle_request(self, ask: PeerRequest, address: str) -> MemberResponse | bool:
        return self.answer if ask.code == 307 else False


async def with_cluster(body, *before: str, topics: Iterable[str] = ("Orders",), **keywords) -> None:  # type: ignore[no-untyped-def]
    """Run a test with a cluster and a session; `before` are NameServers queried first."""
    cluster = FakeCluster(topics)
    async with serving(cluster.names) as names, serving(cluster.serve_broker) as broker:
        cluster.broker = broker.address
        session = new_session([*before, names.address], **keywords)
        await session.start()
        try:
            await body(cluster, session)
        finally:
            await session.close()
    assert asyncio.all_tasks() == {asyncio.current_task()}


def new_session(nameservers: list[str] | str, **keywords) -> Session:  # type: ignore[no-untyped-def]
    options: ClientKeywords = keywords
    return Session(ClientOptions(nameservers, **options))


def test_a_dead_nameserver_is_skipped_and_then_queried_last(run: Run) -> None:
    async def body(cluster: FakeCluster, session: Session) -> None:
        route = await session.route("Orders")
        assert len(route.write_queues) == 4
        assert session.nameservers._in_order()[0] != DEAD

    run(with_cluster(body, DEAD))


def test_the_error_without_an_answer_names_every_nameserver_with_its_reason(run: Run) -> None:
    async def body() -> None:
        session = new_session([DEAD, "127.0.0.1:2"])
        await session.start()
        with pytest.raises(NoNameServer, match=r"127.0.0.1:1: .*refused.*127.0.0.1:2: .*refused"):
            await session.route("Orders")
        await session.close()

    run(body())


def test_an_unknown_topic_error_names_the_nameserver_and_similar_topics(run: Run) -> None:
    async def body(cluster: FakeCluster, session: Session) -> None:
        with pytest.raises(NoRoute, match=r"'Order' .*similar topics: Orders") as caught:
            await session.route("Order")
        assert session.nameservers.addresses[0] in str(caught.value)
        assert caught.value.retry

    run(with_cluster(body, topics=("Orders", "Payments")))


def test_concurrent_queries_of_a_route_are_sent_once(run: Run) -> None:
    async def body(cluster: FakeCluster, session: Session) -> None:
        routes = await asyncio.gather(*(session.route("Orders") for _ in range(20)))
        assert len({id(route) for route in routes}) == 1
        assert cluster.count(RequestCode.GET_ROUTEINFO_BY_TOPIC) == 1

    run(with_cluster(body))


def test_members_are_notified_of_a_changed_route(run: Run) -> None:
    clock = VirtualClock()

    async def body(cluster: FakeCluster, session: Session) -> None:
        group = Group()
        await session.join(group)
        assert [len(route.write_queues) for route in group.routes] == [4]
        cluster.queues = 2
        asked = cluster.count(RequestCode.GET_ROUTEINFO_BY_TOPIC)
        while cluster.count(RequestCode.GET_ROUTEINFO_BY_TOPIC) == asked or len(group.routes) < 2:
            await clock.elapse(30_000)
        assert [len(route.write_queues) for route in group.routes] == [4, 2]
        assert len((await session.route("Orders")).write_queues) == 2

    run(with_cluster(body, clock=clock))


def test_a_deleted_topic_keeps_its_last_route(run: Run) -> None:
    async def body(cluster: FakeCluster, session: Session) -> None:
        known = await session.route("Orders")
        cluster.topics.clear()
        assert await session.find_route("Orders") is None
        assert await session.route("Orders") is known

    run(with_cluster(body))


def test_heartbeats_name_all_groups_and_leave_unregisters(run: Run) -> None:
    async def body(cluster: FakeCluster, session: Session) -> None:
        group = Group()
        await session.join(group)
        (send_heartbeats,) = cluster.beats()
        assert send_heartbeats.client_id == session.client_id
        assert [data.group_name for data in send_heartbeats.producer_data_set] == ["senders"]
        assert [data.group_name for data in send_heartbeats.consumer_data_set] == ["readers"]
        assert session.versions == {cluster.broker: 493}
        await session.leave(group)
        gone = [f.ext for f in cluster.requests if f.code == RequestCode.UNREGISTER_CLIENT]
        assert gone == [
            {"clientID": session.client_id, "producerGroup": "senders"},
            {"clientID": session.client_id, "consumerGroup": "readers"},
        ]
        await session.send_heartbeats()
        assert len(cluster.beats()) == 1

    run(with_cluster(body))


def test_heartbeats_are_sent_periodically(run: Run) -> None:
    clock = VirtualClock()

    async def body(cluster: FakeCluster, session: Session) -> None:
        await session.join(Group())
        while len(cluster.beats()) < 3:
            await clock.elapse(30_000)

    run(with_cluster(body, clock=clock))


def test_a_heartbeat_is_sent_again_after_a_lost_connection(run: Run) -> None:
    async def body(cluster: FakeCluster, session: Session) -> None:
        await session.join(Group())
        await session.ensure_heartbeat("a")
        assert len(cluster.beats()) == 1
        assert cluster.wire is not None
        cluster.wire.writer.transport.abort()
        while session.broker("a").connected:
            await asyncio.sleep(0)
        await session.ensure_heartbeat("a")
        assert len(cluster.beats()) == 2

    run(with_cluster(body))


def test_requests_of_brokers_reach_their_member(run: Run) -> None:
    async def late() -> Response:
        await asyncio.sleep(0)
        return Response(0, {"late": "yes"})

    async def failing() -> Response:
        raise RuntimeError("a handler's fault")

    async def body(cluster: FakeCluster, session: Session) -> None:
        group = Group()
        await session.join(group)
        assert cluster.wire is not None
        answers = []
        for opaque, answer in enumerate([Response(0, {"now": "yes"}), late(), failing(), False]):
            group.answer = answer
            cluster.wire.ask(307, opaque)
            answers.append(await cluster.answers.get())
        assert [a.opaque for a in answers] == [0, 1, 2, 3]
        assert [a.code for a in answers] == [0, 0, 1, 3]
        assert answers[0].ext == {"now": "yes"}
        assert answers[1].ext == {"late": "yes"}
        assert "a handler's fault" in (answers[2].remark or "")

    run(with_cluster(body))


def test_a_refusal_raises_the_error_of_its_code(run: Run) -> None:
    async def body(cluster: FakeCluster, session: Session) -> None:
        await session.route("Orders")
        with pytest.raises(NoPermission, match="not you") as caught:
            await session.call(session.broker("a"), RequestCode.GET_MAX_OFFSET, {})
        assert caught.value.answer_code == 16
        assert cluster.broker in str(caught.value)

    run(with_cluster(body))


def test_an_unknown_broker_has_no_address(run: Run) -> None:
    async def body(cluster: FakeCluster, session: Session) -> None:
        with pytest.raises(NoRoute, match="'nobody'"):
            session.broker("nobody")

    run(with_cluster(body))


def test_a_forked_or_closed_session_raises(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        session = new_session(DEAD)
        with pytest.raises(ClientClosed, match="not started"):
            await session.route("Orders")
        await session.start()
        pid = os.getpid()
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda: pid + 1)
            with pytest.raises(ClientForked, match=f"belongs to process {pid}"):
                await session.route("Orders")
        await session.close()
        await session.close()

    run(body())


def test_two_sessions_of_a_process_have_different_ids(run: Run) -> None:
    async def body() -> None:
        first, second = new_session(DEAD), new_session(DEAD, instance_name="mine")
        third = new_session(DEAD)
        for session in (first, second, third):
            await session.start()
        assert first.client_id != third.client_id
        assert f"@{os.getpid()}#" in first.client_id
        assert second.client_id.endswith("@mine")
        for session in (first, second, third):
            await session.close()

    run(body())


@contextmanager
def listing(text: Callable[[], str]) -> Iterator[str]:
    """An HTTP server that lists NameServers."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text().encode())

        def log_message(self, *arguments: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/rocketmq/nsaddr"
        finally:
            server.shutdown()
            thread.join()


def test_the_nameserver_url_is_read_periodically(run: Run) -> None:
    clock = VirtualClock()

    async def body() -> None:
        cluster = FakeCluster()
        lists = [DEAD]
        async with serving(cluster.names) as names:
            with listing(lambda: ";".join(lists)) as url:
                session = new_session(url, clock=clock)
                await session.start()
                assert session.nameservers.addresses == (DEAD,)
                lists[:] = [DEAD, names.address]
                while len(session.nameservers.addresses) < 2:
                    await clock.elapse(120_000)
                assert (await session.route("Orders")).topic == "Orders"
                lists[:] = ["nonsense"]
                await clock.elapse(120_000)
                await session.close()

    run(body())


def test_an_unreadable_nameserver_url_is_named_in_the_error(run: Run) -> None:
    async def body() -> None:
        session = new_session(f"http://{DEAD}/list")
        with pytest.raises(NoNameServer, match=rf"cannot read http://{DEAD}/list:"):
            await session.start()
        await session.close()

    run(body())


def test_a_protocol_error_closes_only_its_connection(run: Run) -> None:
    async def nonsense(wire: Wire) -> None:
        await wire.read()
        wire.writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    async def body() -> None:
        async with serving(nonsense) as server:
            assert isinstance(server, Server)
            session = new_session(server.address)
            await session.start()
            with pytest.raises(NoNameServer, match="frame"):
                await session.route("Orders")
            await session.close()

    run(body())


def test_an_invalid_address_does_not_stop_heartbeats(run: Run) -> None:
    clock = VirtualClock()

    async def body(cluster: FakeCluster, session: Session) -> None:
        cluster.replica = "nowhere"
        await session.join(Group())
        while len(cluster.beats()) < 3:
            await clock.elapse(30_000)
        assert session.brokers == {"a": {0: cluster.broker}}

    run(with_cluster(body, clock=clock))


def test_a_refused_topic_does_not_stop_the_refresh_of_others(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(cluster: FakeCluster, session: Session) -> None:
        group = Group()
        await session.join(group)
        ask = session.nameservers.find_route

        async def find_route(topic: str) -> TopicRouteData | None:
            if topic == "Forbidden":
                raise NoPermission("not you")
            return await ask(topic)

        monkeypatch.setattr(session.nameservers, "find_route", find_route)
        group._topics = ("Forbidden", "Orders")
        cluster.queues = 2
        await session.refresh()
        assert [len(route.write_queues) for route in group.routes] == [4, 2]

    run(with_cluster(body))


def test_cached_routes_are_refreshed_and_removed_with_their_topic(run: Run) -> None:
    async def body(cluster: FakeCluster, session: Session) -> None:
        await session.route("TBW102")
        cluster.queues = 2
        await session.refresh()
        assert len((await session.route("TBW102")).write_queues) == 2
        cluster.topics.clear()
        await session.refresh()
        assert session.cached_route("TBW102") is None

    run(with_cluster(body, topics=("TBW102",)))


def test_a_heartbeat_to_one_broker_is_not_sent_to_others(run: Run) -> None:
    async def body(cluster: FakeCluster, session: Session) -> None:
        await session.join(Group())
        session.brokers["b"] = {0: DEAD}
        await asyncio.gather(session.ensure_heartbeat("b"), session.ensure_heartbeat("b"))
        assert len(cluster.beats()) == 1, "a dead broker is no reason to bother the others"
        assert session.is_registered_at("a")
        assert not session.is_registered_at("b")

    run(with_cluster(body))


def test_leave_unregisters_at_all_brokers_concurrently(run: Run) -> None:
    async def body(cluster: FakeCluster, session: Session) -> None:
        unregistered: list[str] = []
        both = asyncio.Event()

        class Slow:
            connected = True

            def __init__(self, address: str) -> None:
                self.address = address

            async def call(self, code: int, ext: dict[str, str], *, timeout_ms: int) -> Response:
                unregistered.append(self.address)
                if len(unregistered) == 4:
                    both.set()
                await both.wait()
                return Response()

            async def close(self) -> None: ...

        group = Group()
        await session.join(group)
        peers = session._peers
        session._peers = {name: Slow(name) for name in ("x", "y")}  # type: ignore[misc]
        session._registered = {"x", "y"}
        await session.leave(group)
        session._peers = peers
        assert sorted(unregistered) == ["x", "x", "y", "y"]

    run(with_cluster(body))


def test_close_fails_pending_route_queries(run: Run) -> None:
    asked = asyncio.Event()

    async def silent(wire: Wire) -> None:
        await wire.read()
        asked.set()
        await wire.read()

    async def body() -> None:
        async with serving(silent) as server:
            session = new_session(server.address, timeout_ms=600_000)
            await session.start()
            asking = asyncio.ensure_future(session.route("Orders"))
            await asked.wait()
            await session.close()
            with pytest.raises(ClientClosed):
                await asking

    run(body())


def test_equal_process_ids_on_two_machines_give_different_client_ids(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body() -> None:
        ids = set()
        for _ in range(2):  # two containers: both have process id 1, and often the same address
            monkeypatch.setattr(
                "penstock.client.client_session._instance_numbers", itertools.count(1)
            )
            session = new_session(DEAD)
            await session.start()
            ids.add(session.client_id)
            await session.close()
        assert len(ids) == 2

    run(body())


def test_a_nameserver_url_that_is_not_http_is_reported(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_http(url: str) -> str:
        raise http.client.BadStatusLine("SSH-2.0")

    async def body() -> None:
        monkeypatch.setattr("penstock.client.nameserver_client._read_url", no_http)
        session = new_session("http://127.0.0.1:1/list")
        with pytest.raises(NoNameServer, match=r"cannot read.*SSH-2\.0"):
            await session.start()

    run(body())


def test_close_cancels_a_refresh_in_flight(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = VirtualClock()

    async def body(cluster: FakeCluster, session: Session) -> None:
        asked = asyncio.Event()
        await session.join(Group())

        async def silent(topic: str) -> None:
            asked.set()
            await asyncio.Event().wait()

        monkeypatch.setattr(session.nameservers, "find_route", silent)
        await clock.elapse(30_000)
        assert asked.is_set()
        await asyncio.wait_for(session.close(), 10)

    run(with_cluster(body, clock=clock))
