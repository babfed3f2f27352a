"""RocketMQ's own clients on whole topics, and Apache's admin tool, in the JVM of a session.

Messages are told as objects; bodies are reported by length and by RocketMQ's 31-bit CRC of the
uncompressed bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from .java_session import JavaSession

Line = dict[str, Any]


def produce(
    java: JavaSession, namesrv: str, counts: Mapping[str, int], *, seed: int = 1
) -> list[Line]:
    """Send `counts[topic]` messages to each topic; one line per acknowledged message.

    Line: ``topic queue_id queue_offset msg_id offset_msg_id batch(size) flag keys tags body_crc
    body_length``.
    """
    lines: list[Line] = java.do("load.produce", namesrv=namesrv, topics=dict(counts), seed=seed)
    return lines


def consume_all(
    java: JavaSession, namesrv: str, topics: Iterable[str], *, commit_as: str | None = None
) -> list[Line]:
    """Every message of `topics`; with `commit_as`, also commit that group's offsets to the end.

    Line: ``topic queue_id queue_offset physical_offset store_size msg_id flag sys_flag
    born_timestamp store_timestamp reconsume_times keys tags properties stored_body_crc body_crc
    body_length born_host transaction_id prepared_offset``; in order of topic (as given), queue,
    offset.
    """
    lines: list[Line] = java.do(
        "load.consume", namesrv=namesrv, topics=list(topics), commit_as=commit_as
    )
    return lines


def query_keys(java: JavaSession, namesrv: str, topic: str, keys: Iterable[str]) -> list[Line]:
    """What the broker's index finds for each key: lines as of consume_all, plus ``key``."""
    lines: list[Line] = java.do("load.query", namesrv=namesrv, topic=topic, keys=list(keys))
    return lines


def mqadmin(java: JavaSession, namesrv: str, command: str, *args: str) -> str:
    """Run a command of Apache's admin tool, of the session's release; returns what it printed.

    The tool ends well even when the command fails: look at the text.
    """
    printed: str = java.do("mqadmin", words=[command, "-n", namesrv, *args])
    return printed
