"""The topic and the group of a benchmark. Only what the benchmark has created is deleted."""

import contextlib
import logging
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from penstock.errors import GroupNotExist, PenstockError

if TYPE_CHECKING:
    from penstock.client.admin.async_admin import AsyncAdmin

log = logging.getLogger(__name__)


@contextlib.asynccontextmanager
async def bench_topic(
    admin: "AsyncAdmin", topic: str, *, create: bool, queues: int | None
) -> AsyncIterator[bool]:
    """Use a topic; with `create` it is created if it does not exist, and deleted at the end.

    Yields whether it was created. Without `create` a missing topic raises NoRoute.
    """
    found = await admin.session.find_route(admin.session.with_namespace(topic))
    if found is not None or not create:
        if found is None:
            await admin.route(topic)  # raises the error that names similar topics
        yield False
        return
    await admin.create_topic(topic, queues=queues)
    try:
        yield True
    finally:
        await _delete(f"the topic {topic}", admin.delete_topic(topic))


@contextlib.asynccontextmanager
async def bench_group(admin: "AsyncAdmin", group: str, *, create: bool) -> AsyncIterator[None]:
    """Use a group; with `create` it is created for the run and deleted at the end."""
    if create:
        await admin.create_group(group)
    try:
        yield
    finally:
        if create:
            await _delete(f"the group {group}", admin.delete_group(group))


async def _delete(what: str, deletion: object) -> None:
    try:
        await deletion  # type: ignore[misc]
    except GroupNotExist:
        pass
    except PenstockError as error:  # the result of the run is worth more than this error
        log.warning("can't delete %s: %s", what, error)
