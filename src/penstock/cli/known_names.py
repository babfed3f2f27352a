"""Checks that a topic or a group exists, before a command answers something about it."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.client.admin.async_admin import AsyncAdmin, GroupInfo


async def find_group(admin: "AsyncAdmin", name: str) -> "GroupInfo":
    """The settings of a group; raises GroupNotExist, which names similar groups.

    It reads the whole list, because Apache's broker creates a group that is queried alone.
    """
    from penstock.client.diagnosis.wording import similar_text
    from penstock.errors import GroupNotExist

    groups = {info.name: info for info in await admin.groups(system=True)}
    if name not in groups:
        raise GroupNotExist(
            f"no broker has the group {name!r}{similar_text('groups', name, groups)}",
            hint="check its name and namespace; penstock group list shows the groups",
        )
    return groups[name]


async def check_topic(admin: "AsyncAdmin", name: str | None) -> None:
    """Raise NoRoute, which names similar topics, if there is no such topic."""
    from penstock.wire.codes import is_internal_topic

    if name is not None and not is_internal_topic(name):
        await admin.route(name)
