"""Filters by properties: ours beside a real Apache broker's, message by message.

Both brokers get the same messages, and the same raw requests: CHECK_CLIENT_CONFIG tells whether a
filter is understood, a pull with the filter in it tells which messages it matches.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

from penstock.wire.codes import PULL_SUBSCRIPTION, RequestCode
from penstock.wire.message import decode_messages, encode_properties
from penstock.wire.output import encode
from tests.filter_cases import ACCEPTED, PROPERTIES, REFUSED, TAILS, ZEROS
from tests.unit.broker.broker_kit import read_reply

from . import penstock
from .clusters import OwnCluster

pytestmark = [pytest.mark.compat, pytest.mark.slow]

TOPIC = "filtered"
BATCH = 32


class Line:
    """A connection to a broker: requests one after the other."""

    def __init__(self, address: str) -> None:
        host, port = address.split(":")
        self._socket = socket.create_connection((host, int(port)), timeout=10)
        self._stream = self._socket.makefile("rb")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stream.close()
        self._socket.close()

    def ask(
        self, code: int, ext: dict[str, str], body: bytes = b""
    ) -> tuple[int, dict[str, str], bytes]:
        self._socket.sendall(encode(code, ext, body, opaque=1, version=493))
        size = self._stream.read(4)
        reply = read_reply(size + self._stream.read(int.from_bytes(size, "big")))
        return reply.code, dict(reply.ext or {}), reply.body

    def send(self, properties: dict[str, str]) -> None:
        ext = {
            "a": "filters", "b": TOPIC, "c": "TBW102", "d": "1", "e": "0", "f": "0",
            "g": "1700000000000", "h": "0", "j": "0", "m": "false",
            "i": encode_properties(properties).decode(),
        }  # fmt: skip
        assert self.ask(RequestCode.SEND_MESSAGE_V2, ext, b"x")[0] == 0

    def understands(self, expression: str) -> bool:
        subscription = {"topic": TOPIC, "subString": expression, "expressionType": "SQL92"}
        body = {"clientId": "c", "group": "filters", "subscriptionData": subscription}
        code, _, _ = self.ask(RequestCode.CHECK_CLIENT_CONFIG, {}, json.dumps(body).encode())
        assert code in (0, 23)
        return code == 0

    def matches(self, expression: str) -> list[int]:
        """The offsets of the messages that a filter matches."""
        offset, found = 0, []
        while offset < len(PROPERTIES):
            ext = {
                "consumerGroup": "filters", "topic": TOPIC, "queueId": "0",
                "queueOffset": str(offset), "maxMsgNums": str(BATCH),
                "sysFlag": str(PULL_SUBSCRIPTION), "commitOffset": "0", "suspendTimeoutMillis": "0",
                "subscription": expression, "subVersion": "0", "expressionType": "SQL92",
            }  # fmt: skip
            code, answer, body = self.ask(RequestCode.PULL_MESSAGE, ext)
            assert code in (0, 20), (expression, code)
            if code == 0:
                found += [message.queue_offset for message in decode_messages(body)]
            assert int(answer["nextBeginOffset"]) > offset
            offset = int(answer["nextBeginOffset"])
        return found


@pytest.fixture(scope="module")
def lines(
    apache_cluster: OwnCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Line, Line]]:
    """Ours and Apache's, with the messages of PROPERTIES in queue 0."""
    root: Path = tmp_path_factory.mktemp("filters")
    names = apache_cluster.namesrv
    with (
        penstock.Broker(root, root / "store", names, defaultTopicQueueNums=1) as ours,
        Line(ours.address) as our_line,
        Line(apache_cluster.broker_address) as their_line,
    ):
        for line in (our_line, their_line):
            for properties in PROPERTIES:
                line.send(properties)
        yield our_line, their_line


@pytest.mark.parametrize("expression", ACCEPTED)
def test_filters_match_the_same_messages(lines: tuple[Line, Line], expression: str) -> None:
    ours, theirs = lines
    assert (ours.understands(expression), theirs.understands(expression)) == (True, True)
    assert ours.matches(expression) == theirs.matches(expression)


@pytest.mark.parametrize("expression", REFUSED)
def test_both_refuse(lines: tuple[Line, Line], expression: str) -> None:
    assert [line.understands(expression) for line in lines] == [False, False]


@pytest.mark.parametrize("expression", TAILS)
def test_what_rocketmq_overlooks_is_refused(lines: tuple[Line, Line], expression: str) -> None:
    assert [line.understands(expression) for line in lines] == [False, True]


def test_a_wrong_filter_gives_nothing_where_rocketmq_gives_everything(
    lines: tuple[Line, Line],
) -> None:
    ours, theirs = lines
    assert theirs.matches("a >") == list(range(len(PROPERTIES)))
    with pytest.raises(AssertionError, match="23"):
        ours.matches("a >")


def test_a_long_zero_is_a_number(lines: tuple[Line, Line]) -> None:
    assert [line.understands(ZEROS[0]) for line in lines] == [True, False]
    ours, theirs = lines
    assert ours.matches(ZEROS[1]) == ours.matches("a = 0 AND b = 'x'")
    assert theirs.matches(ZEROS[1]) == theirs.matches("a = 0")
