"""Groups by name: those that exist, and similar names for one that doesn't."""

from collections.abc import Iterable
from difflib import get_close_matches

from penstock.client.admin.async_admin import AsyncAdmin, GroupInfo
from penstock.errors import GroupNotExist

SIMILAR_MAX = 3


async def find_group(admin: AsyncAdmin, name: str) -> GroupInfo:
    """The settings of a group; raises GroupNotExist.

    It reads the whole list, because Apache's broker creates a group that is queried alone.
    """
    infos = {info.name: info for info in await admin.groups(system=True)}
    if name not in infos:
        raise no_group(name, infos)
    return infos[name]


async def need_group(admin: AsyncAdmin, name: str) -> None:
    """Raise GroupNotExist unless a broker has the group or a consumer of it is connected."""
    infos = {info.name: info for info in await admin.groups(system=True)}
    if name not in infos and not (await admin.members(name)).members:
        raise no_group(name, infos)


def no_group(name: str, names: Iterable[str]) -> GroupNotExist:
    """The error for an unknown group; it names similar groups."""
    return GroupNotExist(
        f"there is no group {name}{similar_names('groups', name, names)}",
        hint="check its name; the page Groups lists them",
    )


def similar_names(what: str, name: str, names: Iterable[str]) -> str:
    """The similar names in brackets; empty if there are none."""
    similar = get_close_matches(name, list(names), SIMILAR_MAX)
    return f" (similar {what}: {', '.join(similar)})" if similar else ""
