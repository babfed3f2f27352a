"""Tables and their files: formats, versions, and crashes at every step."""

import contextlib
import os
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import BodyError, StoreDamaged
from penstock.store.tables.config_tables import (
    FORBID_READ,
    ConfigFile,
    DelayOffsetTable,
    SubscriptionGroupTable,
    TopicTable,
)
from penstock.store.tables.consumer_offset_table import ConsumerOffsetTable
from penstock.wire import fastjson
from penstock.wire.bodies.client_bodies import DataVersion, SubscriptionGroupConfig, TopicConfig
from penstock.wire.bodies.table_bodies import (
    ConsumerOffsetSerializeWrapper,
    DelayOffsetSerializeWrapper,
    SubscriptionGroupWrapper,
    TopicConfigSerializeWrapper,
)

Table = TopicTable | SubscriptionGroupTable | ConsumerOffsetTable | DelayOffsetTable
TABLES: list[type[Table]] = [
    TopicTable,
    SubscriptionGroupTable,
    ConsumerOffsetTable,
    DelayOffsetTable,
]


class PowerCut(Exception):  # noqa: N818
    pass


class SmallDisk:
    """The steps of a durable replace on real files; the power may fail before any of them."""

    def __init__(self, steps_left: int = 1000) -> None:
        self.steps_left = steps_left

    def read(self, path: Path) -> bytes | None:
        return path.read_bytes() if path.exists() else None

    def replace(self, path: Path, data: bytes) -> None:
        beside = path.with_name(path.name + ".tmp")
        for part in (data[: len(data) // 2], data):  # may stop at half a file
            self._step()
            beside.write_bytes(part)
        if path.exists():
            self.rename(path, path.with_name(path.name + ".bak"))
        self.rename(beside, path)

    def rename(self, old: Path, new: Path) -> None:
        self._step()
        os.rename(old, new)

    def _step(self) -> None:
        if self.steps_left == 0:
            raise PowerCut
        self.steps_left -= 1


def parse(data: bytes) -> dict[str, int]:
    return fastjson.decode(data, dict[str, int])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "table.json"


def test_missing_file_is_loaded_as_none(path: Path) -> None:
    assert ConfigFile(SmallDisk(), path).load(parse) is None


def test_persist_keeps_a_backup(path: Path) -> None:
    file = ConfigFile(SmallDisk(), path)
    file.persist(b'{"a":1}')
    file.persist(b'{"a":2}')
    assert file.load(parse) == {"a": 2}
    assert parse(path.with_name("table.json.bak").read_bytes()) == {"a": 1}


@pytest.mark.parametrize("damage", [b"", b'{"a":', b"\0" * 100, b"[1]"])
def test_unreadable_file_is_replaced_by_its_backup(path: Path, damage: bytes) -> None:
    file = ConfigFile(SmallDisk(), path)
    file.persist(b'{"a":1}')
    file.persist(b'{"a":2}')
    path.write_bytes(damage)
    assert file.load(parse) == {"a": 1}
    assert path.with_name("table.json.damaged").read_bytes() == damage
    assert file.load(parse) == {"a": 1}


def test_empty_file_without_a_backup_is_a_missing_file(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path.write_bytes(b"")
    assert ConfigFile(SmallDisk(), path).load(parse) is None
    assert "table.json is empty and has no .bak: starting without it" in caplog.text


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (None, "table.json is missing: using the .bak, perhaps without the last change"),
        (b"", "table.json is empty and was renamed to .damaged: using the .bak"),
        (b"[1]", "table.json can't be read"),
    ],
)
def test_the_use_of_a_backup_is_logged_once(
    path: Path, damage: bytes | None, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    file = ConfigFile(SmallDisk(), path)
    file.persist(b'{"a":1}')
    file.persist(b'{"a":2}')
    path.unlink() if damage is None else path.write_bytes(damage)
    assert file.load(parse) == {"a": 1}
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert message in record.getMessage()


@pytest.mark.parametrize("backup", [None, b"{"])
def test_unreadable_file_and_backup_are_damage_and_kept(path: Path, backup: bytes | None) -> None:
    path.write_bytes(b"not json")
    if backup is not None:
        path.with_name("table.json.bak").write_bytes(backup)
    with pytest.raises(StoreDamaged, match=r"table\.json"):
        ConfigFile(SmallDisk(), path).load(parse)
    assert path.read_bytes() == b"not json"


@pytest.mark.parametrize("steps", range(5))
@pytest.mark.parametrize("predecessor", [False, True])
@pytest.mark.parametrize("damaged", [False, True])
def test_power_cut_at_any_step_leaves_old_or_new(
    path: Path, steps: int, predecessor: bool, damaged: bool
) -> None:
    file = ConfigFile(SmallDisk(), path)
    if predecessor:
        file.persist(b'{"a":0}')
    file.persist(b'{"a":1}')
    expected = [{"a": 1}, {"a": 2}]
    if damaged and predecessor:
        path.write_bytes(b"{")
        expected[0] = {"a": 0}
    cut = ConfigFile(SmallDisk(steps), path)
    try:
        cut.load(parse)
        cut.persist(b'{"a":2}')
    except PowerCut:
        pass
    assert ConfigFile(SmallDisk(), path).load(parse) in expected


# --- tables --------------------------------------------------------------------------------------


def reloaded(table: Table, path: Path) -> Any:
    file = ConfigFile(SmallDisk(), path)
    file.persist(table.snapshot())
    again = type(table)()
    assert again.load(file)
    assert not again.dirty
    return again


def test_topics_file_has_the_format_of_rocketmq(path: Path) -> None:
    table = TopicTable()
    table.put(TopicConfig(topic_name="T", read_queue_nums=8, write_queue_nums=8), 1_700_000_000_123)
    assert table.snapshot().decode() == (
        '{\n\t"dataVersion":{\n\t\t"counter":1,\n\t\t"stateVersion":0,'
        '\n\t\t"timestamp":1700000000123\n\t},\n\t"topicConfigTable":{\n\t\t"T":{'
        '\n\t\t\t"attributes":{},\n\t\t\t"order":false,\n\t\t\t"perm":6,'
        '\n\t\t\t"readQueueNums":8,\n\t\t\t"topicFilterType":"SINGLE_TAG",'
        '\n\t\t\t"topicName":"T",\n\t\t\t"topicSysFlag":0,\n\t\t\t"writeQueueNums":8'
        "\n\t\t}\n\t}\n}"
    )
    assert TopicTable.FILE == "config/topics.json"
    assert reloaded(table, path).topics == table.topics


def test_topic_changes_increase_the_version() -> None:
    table = TopicTable()
    table.seed(TopicConfig(topic_name="TBW102"))
    assert (table.version, table.dirty) == (DataVersion(), True)
    table.put(TopicConfig(topic_name="T"), 10)
    table.state_version = 7
    table.put(TopicConfig(topic_name="T", perm=4), 11)
    table.seed(TopicConfig(topic_name="T", perm=6))
    assert table.version == DataVersion(counter=2, state_version=7, timestamp=11)
    assert table.topics["T"].perm == 4
    table.snapshot()
    assert not table.dirty
    assert table.remove("nobody", 12) is None
    assert not table.dirty
    assert table.remove("T", 13) is not None
    assert table.get("T") is None
    assert (table.version.counter, table.dirty) == (3, True)


def test_topic_without_a_name_gets_it_from_the_key(path: Path) -> None:
    path.write_bytes(b'{"topicConfigTable":{"T":{"perm":4,"order":null}},"dataVersion":null}')
    table = TopicTable()
    assert table.load(ConfigFile(SmallDisk(), path))
    assert table.get("T") == TopicConfig(topic_name="T", perm=4)


@pytest.mark.parametrize("kind", TABLES)
def test_unknown_members_of_a_file_are_kept(kind: type[Table], path: Path) -> None:
    path.write_bytes(b"{future:{'x':[1,2]},another:true,groupTopicMap:{g:['t']}}")
    table = kind()
    table.load(ConfigFile(SmallDisk(), path))
    written = fastjson.decode(table.snapshot(), dict[str, Any])
    assert written["future"] == {"x": [1, 2]}
    assert written["another"] is True
    assert list(written) == sorted(written)
    assert ("groupTopicMap" in written) == (kind is not ConsumerOffsetTable)


@pytest.mark.parametrize("kind", TABLES)
def test_missing_and_damaged_table_files(kind: type[Table], path: Path) -> None:
    assert not kind().load(ConfigFile(SmallDisk(), path))
    path.write_bytes(b'{"dataVersion":5}')
    with pytest.raises(StoreDamaged):
        kind().load(ConfigFile(SmallDisk(), path))


def test_groups_and_their_forbidden_topics(path: Path) -> None:
    table = SubscriptionGroupTable()
    table.seed(SubscriptionGroupConfig(group_name="TOOLS_CONSUMER"))
    table.put(SubscriptionGroupConfig(group_name="g", consume_enable=False), 10)
    table.forbid("g", "T", FORBID_READ, 11)
    table.forbid("g", "U", FORBID_READ, 12)
    table.forbid("g", "U", 0, 13)
    assert table.version.counter == 4
    again = reloaded(table, path)
    assert again.groups == table.groups
    assert (again.forbidden("g", "T"), again.forbidden("g", "U")) == (FORBID_READ, 0)
    assert again.version == table.version
    assert b'"forbiddenTable":{\n\t\t"g":{\n\t\t\t"T":4\n\t\t}\n\t}' in table.snapshot()
    assert table.remove("g", 14) is not None
    assert table.forbidden("g", "T") == 0
    assert table.remove("g", 15) is None
    assert table.version.counter == 5
    table.forbid("g", "T", FORBID_READ, 16)
    table.forbid("g", "T", 0, 17)
    assert b'"forbiddenTable":{}' in table.snapshot()


def random_change(table: TopicTable | SubscriptionGroupTable, rng: Random) -> None:
    name = f"n\u00e4me{rng.randrange(9)}"
    if rng.random() < 0.3:
        table.remove(name, 1)
    elif isinstance(table, TopicTable):
        attributes = {"+message.type": "FIFO"} if rng.random() < 0.5 else {}
        table.put(TopicConfig(topic_name=name, perm=rng.randrange(8), attributes=attributes), 1)
    else:
        table.put(SubscriptionGroupConfig(group_name=name, retry_max_times=rng.randrange(9)), 1)
        table.forbid(name, "T", rng.choice((0, FORBID_READ)), 1)


@pytest.mark.parametrize("kind", [TopicTable, SubscriptionGroupTable])
def test_snapshots_of_configs_equal_those_of_fastjson(
    kind: type[TopicTable | SubscriptionGroupTable], path: Path
) -> None:
    rng = Random(7)
    table = kind()
    for _ in range(60):
        assert table.snapshot() == fastjson.encode_pretty(table.wrapper())
        random_change(table, rng)
    again = reloaded(table, path)
    assert again.snapshot() == table.snapshot()


@pytest.mark.parametrize("kind", [TopicTable, SubscriptionGroupTable])
def test_a_change_of_one_config_encodes_no_other(
    kind: type[TopicTable | SubscriptionGroupTable], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = kind()
    for n in range(100):
        if isinstance(table, TopicTable):
            table.put(TopicConfig(topic_name=f"t{n}"), 1)
        else:
            table.put(SubscriptionGroupConfig(group_name=f"g{n}"), 1)
    whole = len(table.snapshot())
    written: list[int] = []
    encode = fastjson.encode_pretty

    def counted(value: object) -> bytes:
        text = encode(value)
        written.append(len(text))
        return text

    monkeypatch.setattr(fastjson, "encode_pretty", counted)
    if isinstance(table, TopicTable):
        table.put(TopicConfig(topic_name="t50", perm=4), 2)
    else:
        table.put(SubscriptionGroupConfig(group_name="g50", consume_enable=False), 2)
    assert b"50" in table.snapshot()
    assert sum(written) < whole / 20


def test_offsets_file_has_the_format_of_rocketmq(path: Path) -> None:
    table = ConsumerOffsetTable()
    table.commit("T", "G", 0, 123, 5)
    table.commit("T", "G", 1, 120, 5)
    table.commit("%RETRY%G", "G", 0, 0, 5)
    assert table.snapshot().decode() == (
        '{\n\t"dataVersion":{\n\t\t"counter":0,\n\t\t"stateVersion":0,\n\t\t"timestamp":0\n\t},'
        '\n\t"offsetTable":{\n\t\t"T@G":{0:123,1:120\n\t\t},\n\t\t"%RETRY%G@G":{0:0\n\t\t}\n\t}\n}'
    )
    assert table.snapshot() == fastjson.encode_pretty(table.wrapper())
    again = reloaded(table, path)
    assert again.get("T", "G", 1) == 120
    assert again.get("T", "G", 2) is None
    assert again.get("T", "H", 0) is None
    assert dict(again.queues("T", "G")) == {0: 123, 1: 120}
    assert again.topics_of("G") == ["T", "%RETRY%G"]
    assert again.groups_of("T") == ["G"]


def test_offset_may_go_back_and_returns_the_previous_one() -> None:
    table = ConsumerOffsetTable()
    assert table.commit("T", "G", 0, 10, 1) is None
    assert table.commit("T", "G", 0, 4, 1) == 10
    assert table.get("T", "G", 0) == 4


def test_offset_versions_increase_in_steps() -> None:
    offsets = ConsumerOffsetTable()
    for count in range(1, 1001):
        offsets.commit("T", "G", 0, count, count)
        assert offsets.version.counter == count // 500
    assert offsets.version.timestamp == 1000
    delays = DelayOffsetTable()
    for count in range(1, 401):
        delays.commit(3, count, count)
        assert delays.version.counter == count // 200


def test_removing_offsets() -> None:
    table = ConsumerOffsetTable()
    for topic in ("T", "U"):
        for group in ("G", "H"):
            table.commit(topic, group, 0, 1, 1)
    table.snapshot()
    table.remove("T", "nobody", 2)
    assert not table.dirty
    table.remove("T", "G", 2)
    assert table.dirty
    assert (table.groups_of("T"), table.topics_of("G")) == (["H"], ["U"])
    table.remove("U", "G", 3)
    assert (table.groups_of("U"), table.topics_of("G")) == (["H"], [])


def test_delay_offsets(path: Path) -> None:
    table = DelayOffsetTable()
    table.commit(1, 55, 1)
    table.commit(2, 9, 1)
    assert b'"offsetTable":{1:55,2:9\n\t}' in table.snapshot()
    again = reloaded(table, path)
    assert (again.get(1), again.get(2), again.get(18)) == (55, 9, 0)
    assert dict(again.offsets) == {1: 55, 2: 9}


def test_slave_copies_the_tables_of_the_master() -> None:
    version = DataVersion(counter=4, timestamp=9)
    topics = TopicTable()
    topics.put(TopicConfig(topic_name="old"), 1)
    wrapper = TopicConfigSerializeWrapper(
        topic_config_table={"T": TopicConfig(topic_name="T")}, data_version=version
    )
    topics.replace(fastjson.decode(fastjson.encode(wrapper), TopicConfigSerializeWrapper))
    assert (set(topics.topics), topics.version, topics.dirty) == ({"T"}, version, True)

    groups = SubscriptionGroupTable()
    groups.replace(
        SubscriptionGroupWrapper(
            subscription_group_table={"g": SubscriptionGroupConfig()}, data_version=version
        )
    )
    assert groups.groups["g"].group_name == "g"

    offsets = ConsumerOffsetTable()
    offsets.commit("T", "mine", 0, 3, 1)
    offsets.merge(ConsumerOffsetSerializeWrapper(offset_table={"T@G": {0: 7}}))
    assert (offsets.get("T", "mine", 0), offsets.get("T", "G", 0)) == (3, 7)

    delays = DelayOffsetTable()
    delays.replace(DelayOffsetSerializeWrapper(offset_table={1: 2}, data_version=version))
    assert (delays.get(1), delays.version) == (2, version)


@pytest.mark.parametrize("kind", TABLES)
def test_body_is_the_file_on_one_line(kind: type[Table]) -> None:
    table = kind()
    table.version = DataVersion(counter=1)
    body = fastjson.decode(table.body(), dict[str, Any])
    assert body == fastjson.decode(table.snapshot(), dict[str, Any])
    assert b"\n" not in table.body()


names = st.text("abT%_-", min_size=1, max_size=4)


@given(st.lists(st.tuples(names, names, st.integers(0, 9), st.integers(0, 2**63 - 1))))
def test_offsets_round_trip_through_the_file(commits: list[tuple[str, str, int, int]]) -> None:
    table, model = ConsumerOffsetTable(), {}
    for topic, group, queue_id, offset in commits:
        table.commit(topic, group, queue_id, offset, 1)
        model[topic, group, queue_id] = offset
    text = table.snapshot()
    assert text == fastjson.encode_pretty(table.wrapper())
    wrapper = fastjson.decode(text, ConsumerOffsetSerializeWrapper)
    again = ConsumerOffsetTable()
    again.merge(wrapper)
    for (topic, group, queue_id), offset in model.items():
        assert again.get(topic, group, queue_id) == offset


@given(st.binary(max_size=60))
def test_invalid_content_of_a_file_is_a_body_error(data: bytes) -> None:
    for kind in TABLES:
        with contextlib.suppress(BodyError):
            kind()._parse(data)
