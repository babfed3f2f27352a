"""Where the pipeline `lake` starts after it has taken over a lake."""

import json

import pytest

from penstock.errors import BadSetting, LakeRefused
from penstock.spark.pipelines.lake.lake_owner import LakeOwner
from penstock.spark.pipelines.lake.lake_pipeline import check_topics, starting_offsets
from penstock.wire.bodies.client_bodies import MessageQueue


def test_topics_of_a_previous_query_are_refused_later() -> None:
    ends = [json.dumps({topic: {"a": {"0": 7}} for topic in topics}) for topics in ("ab", "a")]
    owner = LakeOwner("q", "c", (ends[0],))
    check_topics(owner, [ends[1]], [MessageQueue("a", "a", 0), MessageQueue("new", "a", 0)])
    with pytest.raises(LakeRefused, match="a previous query wrote b"):
        check_topics(owner, [ends[1]], [MessageQueue("a", "a", 0), MessageQueue("b", "a", 0)])
    check_topics(LakeOwner("q", "c"), [ends[1]], [MessageQueue("b", "a", 0)])


def test_an_adopted_lake_continues_in_each_queue() -> None:
    ended = {"orders": {"a": {"0": 7}}, "bills": {"a": {"0": 1}}, "$initial": {}}
    owner = LakeOwner("q", "c", (json.dumps(ended),))
    queues = [MessageQueue("orders", "a", 0), MessageQueue("orders", "b", 0),
              MessageQueue("new", "a", 0)]  # fmt: skip
    found = starting_offsets(owner, queues, default=-1)
    assert found is not None
    assert json.loads(found) == {"orders": {"a": {"0": 7}, "b": {"0": -2}}, "new": {"a": {"0": -1}}}
    assert starting_offsets(LakeOwner("q", "c"), queues) is None
    with pytest.raises(BadSetting, match="2 sources"):
        starting_offsets(LakeOwner("q", "c", ("{}", "{}")), queues)
