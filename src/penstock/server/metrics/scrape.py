"""What metrics read from the disk before they are shown."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.server.background import in_pool

if TYPE_CHECKING:
    from penstock.broker.metrics.group_lags import GroupLags, GroupTopicLag
    from penstock.clock import Clock
    from penstock.store.store import MessageStore


async def read_lags(lags: GroupLags, store: MessageStore, clock: Clock) -> None:
    """Collect the lags of all groups: offsets in the event loop, store times in the pool."""
    rows: list[GroupTopicLag] = []
    for step in lags.collect():
        await in_pool(store.disk, lambda step=step: lags.read(step))  # type: ignore[misc]
        rows += step
    confirm_offset = store.confirm_offset
    await in_pool(store.disk, lambda: lags.read_earliest(confirm_offset))
    lags.take(rows, clock.now_ms())
