"""Whether what is known of incomplete logs is old enough to be true.

If no log of the in-sync set is known to be complete, the longest one counts. What a controller
knows of a replica may be some seconds old: another one has reported it, or the last heartbeats were
lost. Meanwhile that replica may have become complete, have acknowledged messages, and have lost its
power. So the logs have to look the same for longer than old knowledge lasts, without a master.
"""

from __future__ import annotations

from typing import Final

from penstock.controller.broker_set import HEARTBEAT_MS, BrokerSet, Living

UNCHANGED_MS: Final = HEARTBEAT_MS
"""Longer than heartbeats and then leases of controllers last, with the default timeouts."""
UNSEEN_MS: Final = 2_000
"""If nobody has looked for this long, nothing is known of the time in between."""

_Logs = tuple[tuple[int, int, int], ...]


class UnchangedLogs:
    """The incomplete logs of broker sets, as one controller has seen them."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[_Logs, int, int]] = {}
        """By broker set, with the times since when, and when last."""

    def mark(self, state: BrokerSet | None, living: Living, now_ms: int) -> Living:
        """The same with `changing` logs, if no member of the set is complete."""
        if state is None:
            return living
        members = [(one, living.get(one)) for one in state.before or state.in_sync]
        logs = tuple(
            (one, live.epoch, live.max_offset)
            for one, live in members
            if live is not None and not live.complete
        )
        if not members or len(logs) < len(members):
            self._seen.pop(state.name, None)
            return living
        before, since_ms, seen_ms = self._seen.get(state.name, ((), 0, 0))
        if logs != before or now_ms - seen_ms > UNSEEN_MS:
            since_ms = now_ms
        self._seen[state.name] = logs, since_ms, now_ms
        if now_ms - since_ms >= UNCHANGED_MS:
            return living
        return {one: live._replace(changing=True) for one, live in living.items()}
