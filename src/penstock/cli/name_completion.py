"""Shell completion of topic, group and context names.

Names come from the cluster that the options so far name. The shell waits for them, so a cluster
that does not answer soon gives no names. Completion never prints an error.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING

import click

from penstock.cli.contexts.context_file import read_contexts
from penstock.cli.remote import ClusterOptions

if TYPE_CHECKING:
    from penstock.client.admin.async_admin import AsyncAdmin

WAIT_S = 1.5
NAMES_MAX = 1_000


def topic_names(context: click.Context, parameter: click.Parameter, part: str) -> list[str]:
    """The topics that begin with a text; retry, dead letter and system topics only after `%`."""

    async def names(admin: "AsyncAdmin") -> Iterable[str]:
        from penstock.client.admin.admin_topics import kind_of
        from penstock.client.admin.async_admin import TopicKind

        found = await admin.topic_names()
        return found if part.startswith("%") else [
            name for name in found if kind_of(name) is TopicKind.NORMAL
        ]  # fmt: skip

    return _ask(context, part, names)


def group_names(context: click.Context, parameter: click.Parameter, part: str) -> list[str]:
    """The groups that begin with a text."""

    async def names(admin: "AsyncAdmin") -> Iterable[str]:
        return [info.name for info in await admin.groups()]

    return _ask(context, part, names)


def context_names(context: click.Context, parameter: click.Parameter, part: str) -> list[str]:
    """The contexts that begin with a text."""
    with contextlib.suppress(Exception):
        return [name for name in sorted(read_contexts().contexts) if name.startswith(part)]
    return []


def _ask(
    context: click.Context, part: str, names: "Callable[[AsyncAdmin], Awaitable[Iterable[str]]]"
) -> list[str]:
    async def work() -> Iterable[str]:
        async with asyncio.timeout(WAIT_S), _options(context).admin() as admin:
            return await names(admin)

    with contextlib.suppress(Exception):  # an error would garble the command line
        return [name for name in asyncio.run(work()) if name.startswith(part)][:NAMES_MAX]
    return []


def _options(context: click.Context) -> ClusterOptions:
    """The options that stand on the command line so far."""
    given = context.params
    return ClusterOptions(
        access_key=given.get("access_key") or "",
        secret_key=given.get("secret_key") or "",
        strict_signing=bool(given.get("strict_signing")),
        tls=bool(given.get("tls")),
        tls_ca=given.get("tls_ca") or "",
        timeout_ms=int(WAIT_S * 1000),
        nameserver=given.get("nameserver"),
        namespace=given.get("namespace") or "",
    )
