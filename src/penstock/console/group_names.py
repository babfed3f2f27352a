"""Groups by name: those that exist, and the error for one that does not."""

from collections.abc import Iterable

from penstock.client.admin.async_admin import AsyncAdmin, GroupInfo
from penstock.client.diagnosis.wording import similar_text
from penstock.errors import GroupNotExist


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
        f"there is no group {name}{similar_text('groups', name, names)}",
        hint="check its name; the page Groups lists them",
    )
