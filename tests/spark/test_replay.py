"""The pipeline `replay` with real servers."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from penstock import Admin, Message, ReceivedMessage
from penstock.errors import BadSetting, NoRoute, PipelineFailed
from penstock.spark.pipelines.replay import replay_run, selection
from penstock.spark.pipelines.replay.pace import Pace, Pacer, ReplaySlice
from penstock.spark.pipelines.replay.replay_pipeline import replay
from penstock.spark.pipelines.running import find_pipeline, run_pipeline
from tests.compat.penstock import Up
from tests.depth import rounds
from tests.spark.kit import create_topic, read_topic, reader, send, send_numbers
from tests.spark.test_scan import store_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow]

CLOCK_MS = 20
"""A wait may end this much early."""


def run(
    spark: SparkSession, cluster: Up, checkpoint: Path | None = None, *, ctrl_c_at: str = "never",
    **options: Any,
) -> list[str]:  # fmt: skip
    """Run the pipeline, with Ctrl-C at a given line if there is one; returns its lines."""
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        if ctrl_c_at in line:
            os.kill(os.getpid(), signal.SIGINT)

    if "since" in options:
        options["from"] = options.pop("since")
    run_pipeline(
        find_pipeline("replay"), options, spark=spark, connection={"nameserver": cluster.address},
        checkpoint=None if checkpoint is None else str(checkpoint), say=say,
    )  # fmt: skip
    return said


@contextmanager
def driver(
    cluster: Up, checkpoint: Path, *flags: str, **options: str
) -> Iterator[subprocess.Popen[str]]:
    """`penstock pipeline run replay` as a process that has started to send; killed at the end."""
    command = [
        *(str(Path(sys.executable).with_name("penstock")), "pipeline", "run", "replay"),
        *("-n", cluster.address, "--master", "local[1]", "--checkpoint", str(checkpoint)),
        *("--conf", "spark.driver.memory=512m"),
        *(part for name, value in options.items() for part in (f"--{name}", value)),
        *flags,
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=dict(os.environ)) as job:
        assert job.stderr is not None
        said = []
        try:
            for line in job.stderr:
                said.append(line)
                if line.startswith("penstock: slice "):
                    break
            else:
                raise AssertionError("".join(said))
            yield job
        finally:
            job.kill()


def origins(messages: list[ReceivedMessage]) -> Counter[str]:
    """How often each original was sent."""
    return Counter(each.properties[selection.PROPERTY_MESSAGE_ID] for each in messages)


def test_a_topic_is_replayed_with_properties_and_each_queue_in_order(
    spark: SparkSession, cluster: Up, fresh: str, tmp_path: Path
) -> None:
    source, target = create_topic(cluster, fresh, 3), create_topic(cluster, f"{fresh}-to", 4)
    send_numbers(cluster, source, 120)
    said = run(spark, cluster, tmp_path, topics=source, target=target, run="r1", slice_rows=25)
    originals = {each.message_id: each for each in read_topic(cluster, source, 120)}
    copies = read_topic(cluster, target, 120)
    assert origins(copies) == Counter(originals.keys())
    at: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for copy in copies:
        before = originals[copy.properties[selection.PROPERTY_MESSAGE_ID]]
        assert (copy.body, copy.tags, copy.keys) == (before.body, before.tags, before.keys)
        assert copy.properties["n"] == before.properties["n"]
        assert copy.message_id != before.message_id
        assert copy.properties[selection.PROPERTY_RUN] == "r1"
        assert copy.properties[selection.PROPERTY_TOPIC] == source
        broker, queue, offset = copy.properties[selection.PROPERTY_OFFSET].split(":")
        assert (int(queue), int(offset)) == (before.queue_id, before.queue_offset)
        at[f"{broker}:{queue}"].append((copy.queue_id, int(offset)))
    assert len(at) == 3
    for places in at.values():
        assert len({queue for queue, _ in places}) == 1, "messages of a queue go to one queue"
        assert [offset for _, offset in places] == sorted(offset for _, offset in places)
    assert "run r1: all 120 messages were sent" in said
    assert not (tmp_path / "r1" / "rows").exists()

    again = run(spark, cluster, tmp_path, topics=source, target=target, run="r1")
    assert again[-1] == "run r1: all 120 messages were sent"
    assert len(read_topic(cluster, target, 120)) == 120, "a finished run sends nothing"
    with pytest.raises(BadSetting, match="without --tags, but is continued with --tags even"):
        run(spark, cluster, tmp_path, topics=source, target=target, run="r1", tags="even")


def test_a_lake_is_replayed_by_time_key_tag_and_condition(
    spark: SparkSession, cluster: Up, tmp_path: Path, fresh: str
) -> None:
    source = create_topic(cluster, str(int(fresh[-8:], 16)).zfill(12), 1)  # digits only, with zeros
    target = create_topic(cluster, fresh, 1)
    send(cluster, [Message(source, "keys", "odd", ["a", "b"])])
    send_numbers(cluster, source, 40)
    lake = tmp_path / "lake"
    run_pipeline(
        find_pipeline("lake"), {"lake": str(lake), "topics": source}, spark=spark,
        connection={"nameserver": cluster.address}, trigger="available-now",
    )  # fmt: skip
    originals = read_topic(cluster, source, 41)
    common: dict[str, Any] = {"lake": str(lake), "target": target}
    run(spark, cluster, **common, keys="b,7,nothing")
    assert {each.body for each in read_topic(cluster, target, 2)} == {b"keys", b"7"}
    run(spark, cluster, **common, tags="even", where="cast(properties['n'] AS int) >= 34")
    assert [e.body for e in read_topic(cluster, target, 5)[2:]] == [b"34", b"36", b"38"]
    middle = originals[20]
    begin = str(middle.store_ms)
    run(spark, cluster, **common, since=begin, limit=4)
    wanted = [e.body for e in originals if e.store_ms >= int(begin)][:4]
    assert [e.body for e in read_topic(cluster, target, 9)[5:]] == wanted

    sent = len(read_topic(cluster, target, 9))
    said = run(spark, cluster, **common, tags="odd", dry_run=True, speed=2, until="2100-01-01")
    text = "\n".join(said)
    assert "21 messages, " in text
    assert f"  {source}  " in text and "  odd  21 rows" in text  # noqa: PT018
    assert "body='keys'" in text
    assert "at 2 times the original pace" in said[-1] and "nothing was sent" in said[-1]  # noqa: PT018
    assert len(read_topic(cluster, target, sent)) == sent
    with pytest.raises(PipelineFailed, match="no message is selected; the source has 41 mess"):
        run(spark, cluster, **common, keys="nobody")
    with pytest.raises(BadSetting, match=r"condition 'nonsense = 1'.*nonsense"):
        run(spark, cluster, **common, where="nonsense = 1")
    with pytest.raises(BadSetting, match="is not a lake"):
        run(spark, cluster, lake=str(tmp_path), target=target)
    (tmp_path / "data").mkdir()
    with pytest.raises(PipelineFailed, match="has no messages yet"):
        run(spark, cluster, lake=str(tmp_path), target=target)
    with pytest.raises(NoRoute, match=f"{fresh}-missing"):
        run(spark, cluster, lake=str(lake), target=f"{fresh}-missing")


@pytest.mark.proof
def test_a_log_is_replayed_and_sending_to_the_own_topic_needs_same_topic(
    spark: SparkSession, cluster: Up, fresh: str, tmp_path: Path
) -> None:
    topic = create_topic(cluster, fresh, 2)
    send_numbers(cluster, topic, 20)
    store = store_of(cluster)
    with pytest.raises(BadSetting, match=f"messages of {topic} would be sent to the topic"):
        run(spark, cluster, tmp_path, log=str(store), where=f"topic = '{topic}'", target=topic)
    run(
        spark, cluster, tmp_path, log=str(store), topics=topic, same_topic=True,
        delivery="transactional", run="own",
    )  # fmt: skip
    found = read_topic(cluster, topic, 40)
    assert len(found) == 40
    assert Counter(each.body for each in found) == {str(n).encode(): 2 for n in range(20)}


@pytest.mark.parametrize(
    "delivery", ["at-least-once", pytest.param("transactional", marks=pytest.mark.proof)]
)
def test_a_run_that_failed_before_recording_a_slice_is_continued(
    spark: SparkSession, cluster: Up, fresh: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    delivery: str,
) -> None:  # fmt: skip
    source, target = create_topic(cluster, fresh, 2), create_topic(cluster, f"{fresh}-to", 2)
    send_numbers(cluster, source, 30)
    mark_sent = replay_run.RunState.mark_sent

    def fail(self: replay_run.RunState, number: int) -> None:
        if number == 1:
            raise PipelineFailed("simulated failure")
        mark_sent(self, number)

    options = {"topics": source, "target": target, "run": fresh, "delivery": delivery}
    with monkeypatch.context() as patch:
        patch.setattr(replay_run.RunState, "mark_sent", fail)
        with pytest.raises(PipelineFailed, match="simulated failure"):
            run(spark, cluster, tmp_path, **options, slice_rows=10)
    send_numbers(cluster, source, 5)  # not part of the run, which has already selected its messages
    said = run(spark, cluster, tmp_path, **options)
    assert "continuing after 1 of 3 slices" in said
    copies = origins(read_topic(cluster, target, 30))
    assert len(copies) == 30
    twice = 0 if delivery == "transactional" else 10
    assert sum(copies.values()) == 30 + twice

    run(spark, cluster, tmp_path / "elsewhere", **options)  # the same name, but a different run
    assert len(read_topic(cluster, target, 65 + twice)) == 65 + twice


@pytest.mark.timeout(rounds(ci=300, proof=900))
@pytest.mark.parametrize(
    "delivery", ["transactional", pytest.param("at-least-once", marks=pytest.mark.proof)]
)
def test_a_killed_run_is_continued_without_the_source(
    spark: SparkSession, cluster: Up, fresh: str, tmp_path: Path, delivery: str
) -> None:
    source, target = create_topic(cluster, fresh, 2), create_topic(cluster, f"{fresh}-to", 2)
    count, kills = rounds(ci=300, proof=2_000), rounds(ci=1, proof=3)
    send_numbers(cluster, source, count)
    originals = {each.message_id for each in read_topic(cluster, source, count)}
    options = {"topics": source, "target": target, "run": fresh, "delivery": delivery}
    seed = random.randrange(1 << 32)
    chance = random.Random(seed)
    for _ in range(kills):
        with driver(cluster, tmp_path, "--slice-rows", "50", **options):
            time.sleep(chance.uniform(0, 1))  # kill it at any step of a slice
    with Admin(cluster.address) as admin:
        admin.delete_topic(source)
    said = run(spark, cluster, tmp_path, **options)
    assert any(line.startswith("continuing after ") for line in said), f"seed {seed}"
    found = origins(read_topic(cluster, target, count))
    assert found.keys() == originals, f"seed {seed}"
    if delivery == "at-least-once":
        assert found.total() <= count + 50 * kills, f"seed {seed}: one slice per kill"
        return
    assert found.total() == count, f"seed {seed}"


def test_ctrl_c_cancels_the_selection(
    spark: SparkSession, cluster: Up, fresh: str, tmp_path: Path
) -> None:
    source, target = create_topic(cluster, fresh, 1), create_topic(cluster, f"{fresh}-to", 1)
    send_numbers(cluster, source, 1)
    slow = "reflect('java.lang.Thread', 'sleep', 150000L) IS NULL"  # longer than a test may take
    said = run(
        spark, cluster, tmp_path, topics=source, target=target, run="slow", where=slow,
        ctrl_c_at="selecting messages",
    )  # fmt: skip
    assert said[-1] == "stopped before the messages were selected; nothing was sent"
    assert not (tmp_path / "slow" / "plan.json").exists()


def test_a_limit_takes_the_first_rows_and_rows_need_a_time(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = spark.sql(
        "SELECT 't' topic, 'b' broker, cast(id % 2 AS int) queue_id, id queue_offset, "
        "cast(string(id) AS binary) body, timestamp_millis(1000 * (9 - id)) store_timestamp "
        "FROM range(10)"
    )
    sent = selection.outgoing_rows(rows, run="r", target="to", limit=4)
    shown = selection.first_rows(rows, 4)
    wanted = [row.body for row in sent.collect()]
    assert [row.body for row in shown.collect()] == wanted
    monkeypatch.setattr(selection, "LIMIT_IN_MEMORY", 3)
    assert [row.body for row in selection.first_rows(rows, 4).collect()] == wanted
    without_time = rows.selectExpr(
        "* except (store_timestamp)", "timestamp(null) AS store_timestamp"
    )
    with pytest.raises(BadSetting, match="10 rows have no timestamp"):
        selection.survey(without_time)


@pytest.mark.proof
def test_the_original_pace_and_the_rate_are_kept(
    spark: SparkSession, cluster: Up, fresh: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = create_topic(cluster, fresh, 1), create_topic(cluster, f"{fresh}-to", 1)
    send_numbers(cluster, source, 9)
    # Three times of three messages each, two minutes apart: at speed 100 that is 1.2 seconds.
    rows = reader(spark, cluster, source).load().selectExpr(
        "* except (store_timestamp)",
        "timestamp_millis(1700000000000 + 120000 * (queue_offset div 3)) AS store_timestamp",
    )  # fmt: skip
    sent: list[tuple[float, int]] = []
    slice_started = Pacer.slice_started

    def record(self: Pacer, each: ReplaySlice, now_ms: float) -> None:
        sent.append((now_ms, each.rows))
        slice_started(self, each, now_ms)

    monkeypatch.setattr(Pacer, "slice_started", record)
    sink, said = {"nameserver": cluster.address}, list[str]()
    pace = Pace(speed=100, step_ms=500)
    assert replay(
        rows, str(tmp_path / "a"), run="a", target=target, pace=pace, sink=sink, say=said.append
    )
    assert [rows for _, rows in sent] == [3, 3, 3]
    for n, (at, _) in enumerate(sent):
        assert at - sent[0][0] >= 1200 * n - CLOCK_MS
    assert said[-1].startswith("slice 3 of 3: 3 rows")

    sent.clear()
    pace = Pace(rate=4, step_ms=1000)
    assert replay(rows, str(tmp_path / "b"), run="b", target=target, pace=pace, sink=sink)
    assert [rows for _, rows in sent] == [4, 4, 1]
    assert sent[2][0] - sent[0][0] >= 2000 - CLOCK_MS
    copies = [int(each.body) for each in read_topic(cluster, target, 18)]
    assert copies == [*range(9), *range(9)]

    stop = threading.Event()
    stop.set()
    stopped = replay(rows, str(tmp_path / "c"), run="c", target=target, sink=sink, stop=stop)
    assert not stopped
    assert len(read_topic(cluster, target, 18)) == 18


@pytest.mark.proof
def test_messages_can_be_sent_as_timer_messages(
    spark: SparkSession, cluster: Up, fresh: str, tmp_path: Path
) -> None:
    source, target = create_topic(cluster, fresh, 1), create_topic(cluster, f"{fresh}-to", 1)
    send_numbers(cluster, source, 3)
    rows = reader(spark, cluster, source).load().selectExpr(
        "* except (store_timestamp)",
        "timestamp_millis(1700000000000 + 60000 * queue_offset) AS store_timestamp",
    )  # fmt: skip
    replay(
        rows, str(tmp_path), run="ahead", target=target, pace=Pace(speed=15), deliver=True,
        sink={"nameserver": cluster.address},
    )  # fmt: skip
    copies = read_topic(cluster, target, 3)
    assert [each.body for each in copies] == [b"0", b"1", b"2"]
    first, last = copies[0].store_ms, copies[-1].store_ms
    assert last - first >= 3000, "the timer keeps the time between messages"


@pytest.mark.proof
def test_decreasing_born_times_do_not_change_the_order_of_a_queue(
    spark: SparkSession, cluster: Up, fresh: str, tmp_path: Path
) -> None:
    source, target = create_topic(cluster, fresh, 1), create_topic(cluster, f"{fresh}-to", 1)
    send_numbers(cluster, source, 10)
    rows = reader(spark, cluster, source).load().selectExpr(
        "* except (born_timestamp)",
        "timestamp_millis(1700000000000 - 1000 * queue_offset) AS born_timestamp",
    )  # fmt: skip
    replay(
        rows, str(tmp_path), run="born", target=target, by="born", pace=Pace(slice_rows=3),
        sink={"nameserver": cluster.address},
    )  # fmt: skip
    assert [int(each.body) for each in read_topic(cluster, target, 10)] == list(range(10))


@pytest.mark.proof
def test_a_run_stopped_by_ctrl_c_is_continued(
    spark: SparkSession, cluster: Up, fresh: str, tmp_path: Path
) -> None:
    source, target = create_topic(cluster, fresh, 1), create_topic(cluster, f"{fresh}-to", 1)
    send_numbers(cluster, source, 40)
    options = {"topics": source, "target": target, "run": "stopped"}
    with driver(cluster, tmp_path, "--rate", "2", "--step", "1s", **options) as job:
        job.send_signal(signal.SIGINT)
        assert job.stderr is not None
        text = job.stderr.read()
        assert job.wait() == 0
    assert "run stopped was stopped; to continue it" in text, text
    assert len(origins(read_topic(cluster, target, 1))) < 40
    said = run(spark, cluster, tmp_path, **options)
    assert any(line.startswith("continuing after ") for line in said)
    assert origins(read_topic(cluster, target, 40)).total() == 40
