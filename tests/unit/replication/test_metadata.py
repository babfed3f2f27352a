"""The tables that a slave copies: pages, offsets, commits, and when they may be used."""

import pytest

from penstock.errors import BodyError
from penstock.replication.metadata import (
    DELIVERED_MS,
    LOG_ENDS_MS,
    TOPIC_PAGES,
    LogEnds,
    TablePages,
    commits_to_send,
    decode_offsets,
    with_commits,
)
from penstock.wire import fastjson
from penstock.wire.bodies.client_bodies import DataVersion, TopicConfig
from penstock.wire.bodies.table_bodies import ConsumerOffsetSerializeWrapper

ONE, TWO = DataVersion(counter=1), DataVersion(counter=2)


def page(*names: str) -> dict[str, TopicConfig]:
    return {name: TopicConfig(topic_name=name) for name in names}


def pages(known: DataVersion = DataVersion()) -> TablePages[TopicConfig]:  # noqa: B008
    return TablePages(TOPIC_PAGES, known)


def test_pages_are_requested_until_the_table_is_complete() -> None:
    table = pages()
    assert table.request() == {"topicSeq": "0", "maxTopicNum": "2000", "dataVersion": ""}
    assert not table.take({"totalTopicNum": "3"}, page("A", "B"), ONE)
    assert table.request()["topicSeq"] == "2"
    assert fastjson.decode(table.request()["dataVersion"].encode(), DataVersion) == ONE
    assert table.take({"totalTopicNum": "3"}, page("C"), ONE)
    assert list(table.entries) == ["A", "B", "C"]


def test_a_master_without_pages_sends_everything() -> None:
    table = pages()
    assert table.take({}, page("A", "B"), ONE)
    assert list(table.entries) == ["A", "B"]


def test_a_known_version_is_not_read_further() -> None:
    table = pages(ONE)
    assert table.take({"totalTopicNum": "3"}, page("A"), ONE)
    assert table.unchanged


def test_a_new_version_begins_again() -> None:
    table = pages()
    assert not table.take({"totalTopicNum": "3"}, page("A", "B"), ONE)
    assert not table.take({"totalTopicNum": "2"}, page("A"), TWO)
    assert table.take({"totalTopicNum": "2"}, page("C"), TWO)
    assert list(table.entries) == ["A", "C"]


def test_a_master_that_sends_no_more_is_reported() -> None:
    table = pages()
    assert not table.take({"totalTopicNum": "3"}, page("A"), ONE)
    with pytest.raises(BodyError, match="3 entries but sent only 1"):
        table.take({"totalTopicNum": "3"}, {}, ONE)


@pytest.mark.parametrize(
    "body",
    [
        b'{"offsetTable":{"T@G":{0:5,10:7}},"dataVersion":{"counter":1}}',
        b'{"offsetTable":{"T@G":{"0":5,"10":7}},"dataVersion":{"counter":1}}',
        b"{'offsetTable':{'T@G':{0:5,10:7}},dataVersion:{counter:1}}",
    ],
)
def test_offsets_are_read_with_and_without_quotes(body: bytes) -> None:
    offsets = decode_offsets(body)
    assert offsets.offset_table == {"T@G": {0: 5, 10: 7}}
    assert offsets.data_version == ONE


def test_a_name_that_looks_like_a_queue_is_kept() -> None:
    body = b'{"offsetTable":{"T{1:@G,2:":{0:5}}}'
    assert decode_offsets(body).offset_table == {"T{1:@G,2:": {0: 5}}


def test_only_commits_ahead_of_the_master_are_sent() -> None:
    offsets = ConsumerOffsetSerializeWrapper(offset_table={"T@G": {0: 10, 1: 10, 2: 10}})
    commits = {("G", "T", 0): 11, ("G", "T", 1): 10, ("G", "T", 2): 9, ("G", "T", 3): 0}
    assert commits_to_send(commits, offsets) == {("G", "T", 0): 11, ("G", "T", 3): 0}
    with_commits(offsets, {**commits, ("H", "U", 0): 4})
    assert offsets.offset_table == {"T@G": {0: 11, 1: 10, 2: 10, 3: 0}, "U@H": {0: 4}}


def test_deliveries_are_searched_from_an_end_that_is_old_enough() -> None:
    ends, now_ms, clock_ms = LogEnds(), 1_000_000, 1_700_000_000_000
    assert ends.before(now_ms, 0) == 0
    for second in range(60):
        ends.add(now_ms + second * 1_000, clock_ms + second * 1_000, 100 + second)
    now_ms += 60_000
    age_s = DELIVERED_MS // 1_000
    assert ends.before(now_ms, 0) == 100 + 60 - age_s
    # The timer has not saved its progress for a while.
    assert ends.before(now_ms, clock_ms + 30_000) == 100 + 30 - age_s
    assert ends.before(now_ms, clock_ms) == 0
    ends.add(now_ms + LOG_ENDS_MS, clock_ms + LOG_ENDS_MS, 900)
    assert ends.before(now_ms + LOG_ENDS_MS, 0) == 0  # the old ones are forgotten
