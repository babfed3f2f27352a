"""Redirected sends: nothing is left over for the next send, and wrong flags are cleared."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from penstock.config import Settings
from penstock.rpc.answers import Reply
from penstock.wire.codes import RequestCode
from penstock.wire.message import encode_properties
from tests.store_kit import small_config
from tests.unit.broker.broker_kit import BrokerFixture, broker_fixture, messages

LONGEST = 32_767


@pytest.fixture
def env(tmp_path: Path) -> Iterator[BrokerFixture]:
    store = msgspec.structs.replace(small_config(sync_flush=False), segment_bytes=1 << 20)
    with broker_fixture(tmp_path / "store", Settings(store=store)) as made:
        yield made


def timed(env: BrokerFixture, filling: int) -> Reply:
    """Send a timer message, whose properties grow by the name of its topic."""
    return env.send("T" * 100, properties={"TIMER_DELAY_SEC": "60", "X": "x" * filling})


@pytest.mark.parametrize("short_of", [130, 170, 210, 1_000])
def test_a_recall_handle_is_returned_only_to_its_producer(
    env: BrokerFixture, short_of: int
) -> None:
    headers = [answer.ext or {} for answer in (timed(env, LONGEST - short_of), env.send())]
    assert "recallHandle" not in headers[1]
    assert ("recallHandle" in headers[0]) == (short_of == 1_000)


def retry(env: BrokerFixture, reconsumed: int) -> Reply:
    """Retry a transactional message as a client before 4.6.1: it still has the prepared flag."""
    properties = {
        "UNIQ_KEY": "A" * 32, "TRAN_MSG": "true", "PGROUP": "p", "DELAY": "3", "RETRY_TOPIC": "T",
    }  # fmt: skip
    ext = {
        "a": "CLIENT_INNER_PRODUCER", "b": "%RETRY%G", "c": "TBW102", "d": "1", "e": "0",
        "f": str(0x04), "g": str(env.now_ms), "h": "0", "j": str(reconsumed), "l": "16",
        "m": "false", "i": encode_properties(properties).decode(),
    }  # fmt: skip
    return env.ask(RequestCode.SEND_MESSAGE_V2, ext, b"again")


def test_a_retry_with_the_prepared_flag_is_delivered(env: BrokerFixture) -> None:
    env.heartbeat()
    assert retry(env, 1).code == 0
    assert env.store.max_offset("%RETRY%G", 0) == 0
    for _ in range(11):
        env.tick(1_000)
    (message,) = messages(env.pull(topic="%RETRY%G"))
    assert (message.body, message.sys_flag & 0x0C) == (b"again", 0)


def test_a_dead_letter_with_the_prepared_flag_can_be_read(env: BrokerFixture) -> None:
    env.heartbeat()
    assert retry(env, 17).code == 0
    env.store.publish()
    (message,) = messages(env.pull(topic="%DLQ%G"))
    assert (message.body, message.sys_flag & 0x0C) == (b"again", 0)
