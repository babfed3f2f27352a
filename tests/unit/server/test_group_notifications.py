"""Notifications of the members of consumer groups, with a server whose loop is run by hand."""

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

from penstock.rpc.answers import NotifyMembers
from penstock.server.client_calls import ClientCalls
from penstock.server.group_notifications import (
    AT_ONCE_MAX,
    PART_MAX,
    PAUSE_MS,
    GroupNotifications,
)


class Member:
    """A connection that keeps what is written to it."""

    def __init__(self, client: int) -> None:
        self.client = client
        self.frames: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.frames.append(data)

    def close(self, why: str) -> None: ...

    def adjust_in_flight(self, change: int) -> None: ...

    def postpone(self, suspended: object, last: bool) -> bool:
        return False


class FakeServer:
    """Runs one loop iteration, or the next timer, when it is told to."""

    def __init__(self) -> None:
        self.connections: dict[int, Member] = {}
        self.timers: list[tuple[int, Callable[[], None]]] = []
        self._soon: list[Callable[[], None]] = []
        self.notifications = GroupNotifications(self, ClientCalls(lambda *_: None))

    def soon(self, call: Callable[..., None], *arguments: Any) -> None:
        self._soon.append(lambda: call(*arguments))

    def later(self, ms: int, call: Callable[..., None], *arguments: Any) -> None:
        self.timers.append((ms, lambda: call(*arguments)))

    def group(self, clients: range) -> dict[int, None]:
        """The members of a group, with their connections."""
        self.connections.update({client: Member(client) for client in clients})
        return dict.fromkeys(clients)

    def notify(self, group: str, members: dict[int, None]) -> None:
        self.notifications.notify(NotifyMembers(group, members))

    def iterate(self) -> None:
        calls, self._soon = self._soon, []
        for call in calls:
            call()

    def finish(self) -> None:
        """Run until nothing is left to do; timers last."""
        while self._soon or self.timers:
            while self._soon:
                self.iterate()
            timers, self.timers = self.timers, []
            for _, call in timers:
                call()

    def counts(self) -> Counter[int]:
        """How many members have got how many notifications."""
        return Counter(len(member.frames) for member in self.connections.values())

    def sent(self) -> int:
        return sum(len(member.frames) for member in self.connections.values())


def test_the_members_of_a_small_group_are_notified_at_once() -> None:
    server = FakeServer()
    server.notify("g", server.group(range(AT_ONCE_MAX)))
    assert server.counts() == {1: AT_ONCE_MAX}
    (frame,) = server.connections[0].frames
    header = json.loads(frame[8:])
    assert (header["code"], header["flag"], header["extFields"]) == (40, 2, {"consumerGroup": "g"})
    server.iterate()
    server.notify("g", server.group(range(AT_ONCE_MAX)))
    assert server.counts() == {1: AT_ONCE_MAX}, "these are new connections"
    server.finish()
    assert server.counts() == {1: AT_ONCE_MAX}


def test_a_large_group_is_notified_in_parts_with_one_frame() -> None:
    server = FakeServer()
    server.notify("g", server.group(range(1_000)))
    assert server.sent() == 0
    before, iterations = 0, 0
    while server.sent() < 1_000:
        server.iterate()
        iterations += 1
        assert 0 < server.sent() - before <= PART_MAX
        before = server.sent()
    assert iterations == 1_000 // PART_MAX
    assert server.counts() == {1: 1_000}
    assert len({id(member.frames[0]) for member in server.connections.values()}) == 1


def test_changes_while_a_notification_waits_cause_one_more() -> None:
    server = FakeServer()
    members = server.group(range(1_000))
    for _ in range(500):
        server.notify("g", members)
        server.iterate()
    assert server.counts() == {1: 1_000}
    assert [ms for ms, _ in server.timers] == [PAUSE_MS]
    server.finish()
    assert server.counts() == {2: 1_000}


def test_n_members_that_join_do_not_cause_n_squared_notifications() -> None:
    server = FakeServer()
    members: dict[int, None] = {}
    for client in range(2_000):
        members.update(server.group(range(client, client + 1)))
        server.notify("g", members)
        server.iterate()
    server.finish()
    assert server.sent() <= AT_ONCE_MAX**2 / 2 + 3 * 2_000
    assert min(server.counts()) >= 1, "also the last one has been notified"


def test_n_members_that_leave_do_not_cause_n_squared_notifications() -> None:
    server = FakeServer()
    members = server.group(range(2_000))
    for client in range(2_000):
        del members[client], server.connections[client]
        server.notify("g", members)
        if client % 100 == 99:
            server.iterate()
        assert server.sent() <= 2_000
    server.finish()


def test_every_member_is_notified_after_the_last_change() -> None:
    server = FakeServer()
    members = server.group(range(300))
    server.notify("g", members)
    server.iterate()
    members.update(server.group(range(300, 310)))
    server.notify("g", members)
    before = {client: len(member.frames) for client, member in server.connections.items()}
    server.finish()
    for client, member in server.connections.items():
        assert len(member.frames) > before[client]


def test_a_small_group_does_not_wait_for_a_large_one() -> None:
    server = FakeServer()
    large = server.group(range(5_000))
    small = server.group(range(5_000, 5_010))
    server.notify("large", large)
    for _ in range(3):
        server.iterate()
        server.notify("small", small)
    assert {len(server.connections[client].frames) for client in small} == {3}


def test_many_small_groups_do_not_make_a_loop_iteration_long() -> None:
    server = FakeServer()
    for group in range(50):
        server.notify(f"g{group}", server.group(range(group * 10, group * 10 + 10)))
    before = server.sent()
    assert before == AT_ONCE_MAX
    while server.sent() < 500:
        server.iterate()
        assert 0 < server.sent() - before <= PART_MAX
        before = server.sent()
    server.finish()
    assert server.counts() == {1: 500}


def test_large_groups_are_notified_in_turn() -> None:
    server = FakeServer()
    groups = [server.group(range(start, start + 1_000)) for start in (0, 1_000, 2_000)]
    for number, members in enumerate(groups):
        server.notify(f"g{number}", members)
    for _ in range(3):
        server.iterate()
    for members in groups:
        assert any(server.connections[client].frames for client in members)
    server.finish()
    assert server.counts() == {1: 3_000}


def test_those_who_have_left_are_not_notified() -> None:
    server = FakeServer()
    members = server.group(range(200))
    server.notify("g", members)
    del members[0]  # it left the group
    closed = server.connections.pop(1)
    server.finish()
    assert server.connections[0].frames == closed.frames == []
    assert server.counts() == {0: 1, 1: 198}


def test_a_group_that_was_created_again_has_its_new_members_notified() -> None:
    server = FakeServer()
    old = server.group(range(200))
    server.notify("g", old)
    server.iterate()
    old.clear()
    server.notify("g", server.group(range(500, 503)))
    server.finish()
    assert {len(server.connections[client].frames) for client in range(500, 503)} == {1}


def test_a_group_that_becomes_empty_leaves_nothing() -> None:
    server = FakeServer()
    members = server.group(range(200))
    server.notify("g", members)
    members.clear()
    server.finish()
    assert server.sent() == 0
    server.notify("g", server.group(range(3)))
    assert server.counts() == {0: 197, 1: 3}
