"""`penstock send`: sends messages from the command line."""

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

from penstock.cli.name_completion import topic_names
from penstock.cli.remote import ClusterOptions, cluster_options, json_option, run
from penstock.cli.terminal import progress_bars
from penstock.cli.times import to_duration, to_time
from penstock.plurals import count_text

if TYPE_CHECKING:
    from penstock.client.messages import Message, SendReceipt
    from penstock.client.producer.async_producer import AsyncProducer

IN_FLIGHT_MAX = 1_000
"""The maximum number of messages in flight."""
PROGRESS_MIN = 100
"""Fewer messages are sent without a progress bar."""
LINE_BYTES_MAX = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class SendJob:
    """What to send, and how often."""

    topic: str
    body: str | bytes
    """The body, or the source of the lines: a text, - or @FILE."""
    tags: str | None
    keys: tuple[str, ...]
    properties: dict[str, str]
    delay: timedelta | None
    at: datetime | None
    ordering_key: str | None
    count: int

    async def messages(self) -> AsyncIterator["Message"]:
        """The messages, read while they are sent."""
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
            for _ in range(self.count if line else 0):  # empty lines are not sent
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
@cluster_options
@click.argument("topic", shell_complete=topic_names)
@click.argument("body")
@click.option("-t", "--tags", help="Tag of the message.")
@click.option(
    "-k",
    "--keys",
    multiple=True,
    metavar="KEY",
    help="Key for message queries. Can be repeated.",
)
@click.option(
    "-p",
    "--property",
    "properties",
    multiple=True,
    metavar="NAME=VALUE",
    callback=_read_properties,
    help="Property of the message. Can be repeated.",
)
@click.option(
    "--delay",
    metavar="DURATION",
    callback=to_duration,
    help="Deliver the message after this time: 30s, 10m, 2h.",
)
@click.option(
    "--at",
    metavar="TIME",
    callback=to_time,
    help="Deliver the message at this time: 2026-08-01T12:00.",
)
@click.option("--ordering-key", help="Messages with the same key go to the same queue, in order.")
@click.option(
    "--count",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="How many times to send the message.",
)
@click.option("--lines", is_flag=True, help="Send each non-empty line as a message.")
@click.option("--group", default="penstock", show_default=True, help="Producer group.")
@json_option
def send(
    cluster: ClusterOptions,
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

    If BODY is -, it is read from stdin; if it is @FILE, from a file. For several messages only
    their number is printed; --json prints each receipt as a line of JSON. The exit code is 1 if a
    message was not acknowledged.
    """
    if delay is not None and at is not None:
        raise click.UsageError("--delay and --at can't be used together")
    if body == "-" and sys.stdin is None:
        raise click.UsageError("BODY is -, but stdin is closed")
    # Read before the loop runs: in the loop a blocking read from a terminal would ignore Ctrl-C.
    content = body if lines else _read_body(body)
    job = SendJob(topic, content, tags, keys, properties, delay, at, ordering_key, count)
    return run(_send(cluster, group, job, as_json=as_json))


async def _send(cluster: ClusterOptions, group: str, job: SendJob, *, as_json: bool) -> int:
    from penstock.client.producer.async_producer import AsyncProducer
    from penstock.errors import PenstockError

    began = time.monotonic()
    sent: list[SendReceipt] = []
    total = degraded = 0
    async with AsyncProducer(cluster.nameserver, group=group, **cluster.keywords()) as producer:
        try:
            with progress_bars(wanted=_is_long(job, as_json=as_json)) as tell:
                async for receipt in _receipts(producer, job):
                    total += 1
                    degraded += bool(receipt.status)
                    sent = [receipt]
                    tell("sending", total, job.count)
                    if as_json:
                        print(json.dumps(_as_json(receipt)), flush=True)
        except PenstockError as error:
            were = "was" if total == 1 else "were"
            before = f"{count_text(total, 'message')} {were} sent, then: " if total else ""
            raise type(error)(before + error.message, hint=error.hint) from None
    if as_json:
        return 0
    if total == 1:
        print(_as_text(sent[0]))
    else:
        spent_s = time.monotonic() - began
        print(f"sent {count_text(total, 'message')} to {job.topic} in {spent_s:.2f} s")
        if degraded:
            print(
                "warning: the broker reported reduced durability for "
                f"{count_text(degraded, 'message')}; --json shows the status of each"
            )
    return 0


def _is_long(job: SendJob, *, as_json: bool) -> bool:
    """Whether a progress bar is shown: the number of messages is known, and not small."""
    known = isinstance(job.body, bytes) and job.count >= PROGRESS_MIN
    return known and not as_json and sys.stderr.isatty()


async def _receipts(producer: "AsyncProducer", job: SendJob) -> AsyncIterator["SendReceipt"]:
    """The receipts, in the order of the messages.

    After a failure no more messages are sent. It is raised when all messages in flight are done.
    """
    from penstock.errors import PenstockError

    in_flight_max = IN_FLIGHT_MAX if job.ordering_key is None else 0
    waiting: deque[asyncio.Future[SendReceipt]] = deque()
    failure: PenstockError | None = None
    try:
        async for message in job.messages():
            waiting.append(producer.submit(message, ordering_key=job.ordering_key))
            while waiting and (waiting[0].done() or len(waiting) > in_flight_max):
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
        lines.append(f"warning: the broker reported reduced durability: {receipt.status.name}")
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


def _read_body(text: str) -> bytes:
    if text == "-":
        return sys.stdin.buffer.read()
    if text.startswith("@"):
        return Path(text[1:]).read_bytes()
    return text.encode()


async def _lines(text: str) -> AsyncIterator[bytes]:
    """The lines of a text, a file or stdin, without line ends; stdin is read as it arrives."""
    if text == "-" and _can_wait(sys.stdin.fileno()):
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
            # The shell that uses this terminal afterwards expects blocking mode.
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


def _can_wait(number: int) -> bool:
    """Whether the loop can wait for input: not for files and devices such as /dev/null."""
    mode = os.fstat(number).st_mode
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(number)


async def _next_line(reader: asyncio.StreamReader) -> bytes:
    from penstock.errors import MessageIllegal

    try:
        return await reader.readline()
    except ValueError:
        raise MessageIllegal(
            f"a line of stdin is longer than {LINE_BYTES_MAX} bytes, the maximum size of a body",
            hint="send shorter lines",
        ) from None
