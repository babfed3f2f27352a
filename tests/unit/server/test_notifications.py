"""Notifications of many clients."""

from collections.abc import Callable

import pytest

from penstock.rpc.answers import NotifyClient, NotifyClients
from penstock.server.notifications import NOTIFIED_MAX, Notifications


class Loop:
    """The next iteration of an event loop, and what was sent to whom."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, str]] = []
        self.soon: list[Callable[[], None]] = []
        self.notifications = Notifications(self._send, self.soon.append)

    def _send(self, request: NotifyClient) -> None:
        self.sent.append((request.client, request.ext["consumerGroup"]))

    def iterate(self) -> list[tuple[int, str]]:
        """What the next iteration sends."""
        calls, self.soon[:], self.sent = list(self.soon), [], []
        for call in calls:
            call()
        return self.sent


@pytest.fixture
def loop() -> Loop:
    return Loop()


def members_of(group: str, *clients: int) -> NotifyClients:
    return NotifyClients(clients, 40, {"consumerGroup": group})


def test_one_iteration_notifies_a_limited_number_of_clients(loop: Loop) -> None:
    everybody = range(2 * NOTIFIED_MAX + 1)
    loop.notifications.add(members_of("g", *everybody))
    sent = [loop.iterate() for _ in range(3)]
    assert [len(part) for part in sent] == [NOTIFIED_MAX, NOTIFIED_MAX, 1]
    assert [client for part in sent for client, _ in part] == list(everybody)
    assert loop.iterate() == loop.soon == []


def test_small_groups_are_notified_together(loop: Loop) -> None:
    loop.notifications.add(members_of("g", 1, 2))
    loop.notifications.add(members_of("h", 2))
    loop.notifications.add(members_of("nobody"))
    assert loop.iterate() == [(1, "g"), (2, "g"), (2, "h")]
    assert loop.soon == []
    loop.notifications.add(members_of("g", 1))
    assert loop.iterate() == [(1, "g")]


def test_changes_of_one_group_are_notified_once(loop: Loop) -> None:
    loop.notifications.add(members_of("g", *range(NOTIFIED_MAX + 5)))
    loop.iterate()
    for _ in range(10):
        loop.notifications.add(members_of("g", 7, 8))
    assert loop.iterate() == [(7, "g"), (8, "g")]
    assert loop.soon == []
