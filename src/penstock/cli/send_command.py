"""`penstock send`: messages from the command line."""

import asyncio
import json
import os
import stat
import sys
import time
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import click

from penstock.cli.remote import Cluster, json_option, on_cluster, run
from penstock.cli.times import to_duration, to_moment

if TYPE_CHECKING:
    from penstock.client.messages import Message, SendReceipt
    from penstock.client.producer.async_producer import AsyncProducer

AHEAD_MAX = 1_000
"""Messages that may wait for their receipt."""
LINE_BYTES_MAX = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be sent, and how often."""

    topic: str
    body: str | bytes
    """The whole body, or where its lines come from."""
    tags: str | None
    keys: tuple[str, ...]
    properties: dict[str, str]
    delay: timedelta | None
    at: datetime | None
    ordering_key: str | None
    count: int

    async def messages(self) -> AsyncIterator["Message"]:
        """One message after the other, read as they are sent."""
        from penstock.client.messages import Message

        shape = Message(
            self.topic,
            tags=self.tags,
            keys=self.keys,
            properties=self.properties,
            delay=self.delay,
            deliver_at=self.at,
        )
        if isinstance(self.body, bytes):
            for _ in range(self.count):
                yield replace(shape, body=self.body)
            return
        async for line in _lines(self.body):
            for _ in range(self.count if line else 0):  # a message has a body
                yield replace(shape, body=line)


def _read_properties(
    context: click.Context, option: click.Parameter, values: tuple[str, ...]
) -> dict[str, str]:
    pairs = {}
    for text in values:
        name, equals, value = text.partition("=")
        if not name or not equals or not value:
            raise click.BadParameter(f"{text!r} is not NAME=VALUE")
        pairs[name] = value
    return pairs


@click.command(short_help="Send messages to a topic.")
@on_cluster
@click.argument("topic")
@click.argument("body")
@click.option("-t", "--tags", help="The tag that consumers choose by.")
@click.option(
    "-k",
    "--keys",
    multiple=True,
    metavar="KEY",
    help="A key to look the message up by; may be given several times.",
)
@click.option(
    "-p",
    "--property",
    "properties",
    multiple=True,
    metavar="NAME=VALUE",
    callback=_read_properties,
    help="A property; may be given several times.",
)
@click.option(
    "--delay",
    metavar="DURATION",
    callback=to_duration,
    help="Deliver it after this time: 30s, 10m, 2h.",
)
@click.option(
    "--at", metavar="TIME", callback=to_moment, help="Deliver it at this time: 2026-08-01T12:00."
)
@click.option("--ordering-key", help="Messages with the same key go to one queue, in order.")
@click.option(
    "--count", type=click.IntRange(1), default=1, show_default=True, help="How often to send it."
)
@click.option("--lines", is_flag=True, help="Each line that is not empty is a message.")
@click.option("--group", default="penstock", show_default=True, help="The producer group.")
@json_option
def send(
    cluster: Cluster,
    topic: str,
    body: str,
    tags: str | None,
    keys: tuple[str, ...],
    properties: dict[str, str],
    delay: timedelta | None,
    at: datetime | None,
    ordering_key: str | None,
    count: int,
    lines: bool,
    group: str,
    as_json: bool,
) -> int:
    """Send BODY to TOPIC and print the receipt.

    A BODY of - is read from stdin, @FILE from a file. Of several messages the number is printed;
    --json prints each receipt as a line. Exit code 1: some were not acknowledged.
    """
    if delay is not None and at is not None:
        raise click.UsageError("--delay and --at exclude each other")
    if body == "-" and sys.stdin is None:
        raise click.UsageError("a body of - is read from stdin, which is closed")
    # Read before the loop runs: there a read that waits for a terminal would not hear Ctrl-C.
    content = body if lines else _whole(body)
    job = Job(topic, content, tags, keys, properties, delay, at, ordering_key, count)
    return run(_send(cluster, group, job, as_json=as_json))


async def _send(cluster: Cluster, group: str, job: Job, *, as_json: bool) -> int:
    from penstock.client.producer.async_producer import AsyncProducer
    from penstock.errors import PenstockError

    began = time.monotonic()
    sent: list[SendReceipt] = []
    total = less_safe = 0
    async with AsyncProducer(cluster.nameserver, group=group, **cluster.keywords()) as producer:
        try:
            async for receipt in _receipts(producer, job):
                total += 1
                less_safe += bool(receipt.status)
                sent = [receipt]
                if as_json:
                    print(json.dumps(_as_json(receipt)), flush=True)
        except PenstockError as error:
            others = f"{total:,} messages were sent; " if total else ""
            raise type(error)(others + error.message, hint=error.hint) from None
    if as_json:
        return 0
    if total == 1:
        print(_as_text(sent[0]))
    else:
        print(f"sent {total:,} messages to {job.topic} in {time.monotonic() - began:.2f} s")
        if less_safe:
            print(f"{less_safe:,} of them less safely than they should be; --json tells each")
    return 0


async def _receipts(producer: "AsyncProducer", job: Job) -> AsyncIterator["SendReceipt"]:
    """The receipts in the order of the messages, some way behind the sending.

    After a failure no more are sent; it is raised when all that were under way have ended.
    """
    from penstock.errors import PenstockError

    ahead_max = AHEAD_MAX if job.ordering_key is None else 0
    waiting: deque[asyncio.Future[SendReceipt]] = deque()
    failure: PenstockError | None = None
    try:
        async for message in job.messages():
            waiting.append(producer.submit(message, ordering_key=job.ordering_key))
            while waiting and (waiting[0].done() or len(waiting) > ahead_max):
                yield await waiting.popleft()
    except PenstockError as error:
        failure = error
    while waiting:
        try:
            receipt = await waiting.popleft()
        except PenstockError as error:
            failure = failure or error
        else:
            yield receipt
    if failure is not None:
        raise failure


def _as_text(receipt: "SendReceipt") -> str:
    queue = receipt.queue
    lines = [
        f"sent {receipt.message_id} to {queue.topic}, queue {queue.queue_id} of "
        f"{queue.broker_name}, offset {receipt.queue_offset}"
    ]
    if receipt.status:
        lines.append(f"less safely than it should be: {receipt.status.name}")
    if receipt.recall_handle:
        lines.append(f"recall handle: {receipt.recall_handle}")
    return "\n".join(lines)


def _as_json(receipt: "SendReceipt") -> dict[str, object]:
    queue = receipt.queue
    return {
        "status": receipt.status.name,
        "message_id": receipt.message_id,
        "offset_id": receipt.offset_id,
        "topic": queue.topic,
        "broker": queue.broker_name,
        "queue": queue.queue_id,
        "offset": receipt.queue_offset,
        "recall_handle": receipt.recall_handle,
    }


def _whole(text: str) -> bytes:
    if text == "-":
        return sys.stdin.buffer.read()
    if text.startswith("@"):
        return Path(text[1:]).read_bytes()
    return text.encode()


async def _lines(text: str) -> AsyncIterator[bytes]:
    """The lines of a text, a file or stdin, without their ends; stdin may take its time."""
    if text == "-" and _may_wait(sys.stdin.fileno()):
        reader = asyncio.StreamReader(limit=LINE_BYTES_MAX)
        loop = asyncio.get_running_loop()
        same = os.dup(sys.stdin.fileno())
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
        )
        try:
            while line := await _next_line(reader):
                yield line.rstrip(b"\r\n")
        finally:
            # The shell that goes on with this terminal does not expect another mode.
            os.set_blocking(same, True)
            os.close(same)
            transport.close()
        return
    if text == "-":
        for line in sys.stdin.buffer:
            yield line.rstrip(b"\r\n")
    elif text.startswith("@"):
        with Path(text[1:]).open("rb") as file:
            for line in file:
                yield line.rstrip(b"\r\n")
    else:
        for line in text.encode().splitlines():
            yield line


def _may_wait(number: int) -> bool:
    """Whether a loop can wait for what comes there: not for files and devices as /dev/null."""
    mode = os.fstat(number).st_mode
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(number)


async def _next_line(reader: asyncio.StreamReader) -> bytes:
    from penstock.errors import MessageIllegal

    try:
        return await reader.readline()
    except ValueError:
        raise MessageIllegal(
            f"a line of stdin is longer than {LINE_BYTES_MAX} bytes, the most of a message",
            hint="send shorter lines",
        ) from None
