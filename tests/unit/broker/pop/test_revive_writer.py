"""The entries of the revive log, byte by byte: RocketMQ's JSON in alphabetical order."""

from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.broker.pop.checkpoints import CheckpointKey, PopCheckpoint, count_bits
from tests.unit.broker.broker_kit import NOW_MS, BrokerFixture, broker_fixture
from tests.unit.broker.pop.pop_kit import REVIVE, stored

NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=100)
OFFSETS = st.one_of(
    st.builds(lambda first, count: list(range(first, first + count)), st.integers(0, 99),
              st.integers(1, 32)),
    st.lists(st.integers(0, 2**40), min_size=1, max_size=32, unique=True).map(sorted),
)  # fmt: skip


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerFixture]:
    with broker_fixture(tmp_path_factory.mktemp("revive") / "store") as made:
        yield made


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(NAMES, NAMES, OFFSETS, st.integers(0, 2**32), st.data())
def test_entries_are_written_as_json(
    env: BrokerFixture, topic: str, group: str, offsets: list[int], next_offset: int,
    data: st.DataObject,
) -> None:  # fmt: skip
    writer, key = env.broker.pop.revive_log.writer, CheckpointKey(topic, group, 3, 0, NOW_MS)
    checkpoint = PopCheckpoint(key, 60_000, offsets, 5)
    checkpoint.acked = acked = data.draw(st.integers(0, (1 << len(offsets)) - 2))
    with_next = data.draw(st.booleans())
    writer.write_checkpoint(checkpoint, NOW_MS, *([next_offset] if with_next else []))
    named = {"bn": env.live.current.broker.name, "c": group, "pt": NOW_MS, "q": 3, "so": 0}
    entry = stored(env, REVIVE, 5)[-1]
    assert entry.queue_offset == checkpoint.revive_offset
    assert entry.body == encoded(
        named,
        bm=acked if acked < 1 << 31 else acked - (1 << 32),
        d=offsets, it=60_000, n=len(offsets), ro=0, t=topic,
    )  # fmt: skip
    assert entry.properties == {
        "TAGS": "ck",
        **({"POP_NEXT": str(next_offset)} if with_next else {}),
        "TIMER_DELIVER_MS": str(NOW_MS + 59_000),
    }
    env.broker.pop.revive_log.checkpoints.add(checkpoint)
    bits = data.draw(st.integers(0, (1 << len(offsets)) - 1)) | 1 << len(offsets) - 1
    fresh = [offset for offset in offsets if checkpoint.bit_of(offset) & bits & ~acked]
    assert writer.ack(checkpoint, bits, NOW_MS) == len(fresh)
    env.broker.pop.revive_log.checkpoints.close(checkpoint)
    if fresh:
        acks = {"ao": 0, "aol": fresh} if len(fresh) > 1 else {"ao": fresh[0]}
        entry = stored(env, REVIVE, 5)[-1]
        assert entry.body == encoded(named, **acks, t=topic)
        tag = "bAck" if len(fresh) > 1 else "ack"
        assert entry.properties == {"TAGS": tag, "TIMER_DELIVER_MS": str(NOW_MS)}
        writer.write_acks(key, 5, fresh, NOW_MS)
        assert stored(env, REVIVE, 5)[-1].body == entry.body


def encoded(named: dict[str, object], **members: object) -> bytes:
    return msgspec.json.encode(dict(sorted((named | members).items())))


@given(OFFSETS, st.integers(0, 2**45))
def test_bits_of_messages(offsets: list[int], distances: int) -> None:
    checkpoint = PopCheckpoint(CheckpointKey("T", "G", 0, 0, NOW_MS), 1, offsets, 0)
    assert checkpoint.offsets() == offsets
    bits = [checkpoint.bit_of(offset) for offset in offsets]
    assert bits == [1 << index for index in range(len(offsets))]
    assert checkpoint.bit_of(offsets[-1] + 1) == 0
    assert checkpoint.bit_of(-1) == 0
    wanted = sum(bit for offset, bit in zip(offsets, bits, strict=True) if distances >> offset & 1)
    assert checkpoint.bits_of(distances) == wanted
    assert count_bits(distances) == distances.bit_count()
    assert checkpoint.end_offset() == offsets[-1] + 1
