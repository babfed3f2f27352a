"""RocketMQ's own clients against any name server, Apache's or ours.

Thin wrappers around the Java programs Produce, ConsumeAll and QueryKey; `version` chooses the
client release. Each returns the JSON lines of the program as objects; bodies are reported by
length and by RocketMQ's 31-bit CRC of the uncompressed bytes. And Apache's admin tool.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from . import maven

Line = dict[str, Any]


def produce(
    namesrv: str, counts: Mapping[str, int], *, seed: int = 1, version: str = maven.V5_4
) -> list[Line]:
    """Send `counts[topic]` messages to each topic; one line per acknowledged message.

    Line: ``topic queue_id queue_offset msg_id offset_msg_id batch(size) flag keys tags body_crc
    body_length``.
    """
    topics = ",".join(f"{topic}:{count}" for topic, count in counts.items())
    return _run(version, "penstock.Produce", namesrv, topics, str(seed))


def consume_all(
    namesrv: str,
    topics: Iterable[str],
    *,
    commit_as: str | None = None,
    version: str = maven.V5_4,
) -> list[Line]:
    """Every message of `topics`; with `commit_as`, also commit that group's offsets to the end.

    Line: ``topic queue_id queue_offset physical_offset store_size msg_id flag sys_flag
    born_timestamp store_timestamp reconsume_times keys tags properties stored_body_crc body_crc
    body_length born_host transaction_id prepared_offset``; in order of topic (as given), queue,
    offset.
    """
    group = [commit_as] if commit_as else []
    return _run(version, "penstock.ConsumeAll", namesrv, ",".join(topics), *group)


def query_keys(
    namesrv: str, topic: str, keys: Iterable[str], *, version: str = maven.V5_4
) -> list[Line]:
    """What the broker's index finds for each key: lines as of consume_all, plus ``key``."""
    return _run(version, "penstock.QueryKey", namesrv, topic, ",".join(keys))


def mqadmin(namesrv: str, command: str, *args: str) -> str:
    """Run a command of Apache's admin tool (5.4.0) and return what it printed.

    The tool ends well even when the command fails: look at the text.
    """
    main_class = "org.apache.rocketmq.tools.command.MQAdminStartup"
    return maven.run_java(maven.V5_4, main_class, command, "-n", namesrv, *args)


def _run(version: str, main_class: str, *args: str) -> list[Line]:
    printed = maven.run_java(version, main_class, *args, timeout=120)
    return [json.loads(line) for line in printed.splitlines()]
