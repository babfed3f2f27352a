"""Rates, sums and the order of rows."""

from penstock.cli.top.group_figures import largest, sum_up
from penstock.cli.top.screen_snapshot import CounterRates, GroupRow, TopicRow, sorted_rows
from penstock.wire.bodies.admin_bodies import ConsumeStats, ConsumeStatsList, OffsetWrapper
from penstock.wire.bodies.client_bodies import MessageQueue


def group(name: str, lag: int | None) -> GroupRow:
    return GroupRow(name, lag=lag, lag_seconds=None, out_per_second=None, topics=1)


def stats(topic: str, broker: str, *queues: tuple[int, int], tps: float = 0.0) -> ConsumeStats:
    table = {
        MessageQueue(topic, broker, number): OffsetWrapper(broker_offset=end, consumer_offset=done)
        for number, (end, done) in enumerate(queues)
    }
    return ConsumeStats(offset_table=table, consume_tps=tps)


def test_a_rate_needs_two_readings() -> None:
    rates = CounterRates()
    rates.read("t", 100, 10.0)
    assert rates.rate("t") is None
    rates.read("t", 160, 12.0)
    assert rates.rate("t") == 30
    rates.read("t", 160, 13.0)
    assert rates.rate("t") == 0


def test_a_counter_that_starts_again_has_no_rate_until_the_next_reading() -> None:
    rates = CounterRates()
    for value, at in ((100, 1.0), (200, 2.0), (5, 3.0)):
        rates.read("t", value, at)
    assert rates.rate("t") is None
    rates.read("t", 15, 4.0)
    assert rates.rate("t") == 10


def test_forgotten_counters() -> None:
    rates = CounterRates()
    rates.read("t", 1, 1.0)
    rates.read("t", 2, 2.0)
    rates.keep({"other": None})
    assert rates.rate("t") is None
    rates.read("t", 9, 3.0)
    assert rates.rate("t") is None


def test_rows_without_a_value_are_last_in_both_directions() -> None:
    rows = [group("b", None), group("a", 1), group("c", 3), group("d", 3)]
    assert [row.name for row in sorted_rows(rows, "lag")] == ["c", "d", "a", "b"]
    assert [row.name for row in sorted_rows(rows, "lag", reverse=True)] == ["a", "c", "d", "b"]
    assert [row.name for row in sorted_rows(rows, "name")] == ["a", "b", "c", "d"]
    assert [row.name for row in sorted_rows(rows, "name", reverse=True)] == ["d", "c", "b", "a"]


def test_sums_over_groups_topics_and_brokers() -> None:
    first = ConsumeStatsList(
        consume_stats_list=[
            {"g": [stats("t", "a", (10, 4), (5, 5), tps=2.0), stats("u", "a", (1, 1))]},
            {"h": [stats("t", "a", (10, 0), (5, 0), tps=1.0)]},
            {"silent": []},
        ]
    )
    second = ConsumeStatsList(consume_stats_list=[{"g": [stats("t", "b", (20, 19))]}])
    found = sum_up([first, second], lambda group, topic: True, lambda name: name)
    assert found.lags == {"g": 7, "h": 15}
    assert found.next_offsets == {"t": 35, "u": 1}  # queues that two groups consume count once
    assert found.topic_rates["t"] == 3.0
    assert found.topics_of == {"g": {"t", "u"}, "h": {"t"}}
    assert found.groups_of["t"] == {"g", "h"}
    assert largest(found.lagging, 1) == [("h", "t")]


def test_unwanted_groups_and_namespaces() -> None:
    answer = ConsumeStatsList(
        consume_stats_list=[
            {"ns%g": [stats("ns%t", "a", (3, 1))]},
            {"sys": [stats("t", "a", (9, 0))]},
        ]
    )
    found = sum_up([answer], lambda group, topic: group != "sys", lambda n: n.removeprefix("ns%"))
    assert found.lags == {"g": 2}
    assert found.lagging == {("ns%g", "ns%t"): 2}


def test_a_topic_row_may_be_unknown() -> None:
    rows = [TopicRow("a", None, None, 3, None), TopicRow("b", 1.0, 0.0, 1, 0)]
    assert [row.name for row in sorted_rows(rows, "in_per_second")] == ["b", "a"]
