"""`penstock.arrow` takes the options of the Spark source, and needs no Spark."""

import os
import subprocess
import sys
import textwrap
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import penstock.arrow
from penstock.arrow import reading
from penstock.arrow.connection_options import CONNECTION_OPTIONS
from penstock.arrow.reading import ReadOptions
from penstock.arrow.source_options import SOURCE_OPTIONS, SourceOptions
from penstock.errors import BadSetting

SPARK_ONLY = {
    "minPartitions",
    "maxOffsetsPerTrigger",
    "minOffsetsPerTrigger",
    "maxTriggerDelay",
    "commitGroup",
}


def options(topic: Any = None, **given: Any) -> SourceOptions:
    return reading._source_options(topic, given)  # type: ignore[arg-type]


def test_options_are_those_of_the_source() -> None:
    assert set(ReadOptions.__annotations__) == {*CONNECTION_OPTIONS, *SOURCE_OPTIONS} - SPARK_ONLY


@pytest.mark.parametrize("name", sorted(SPARK_ONLY))
def test_options_of_spark_are_refused(name: str) -> None:
    with pytest.raises(BadSetting, match=f"the option {name} is for"):
        options("orders", **{name: "2"})


def test_values_of_python_mean_the_same_as_texts() -> None:
    offsets = {"orders": {"broker-a": {0: 3, 1: -2}}}
    found = options(
        "orders",
        nameserver=["h:1", "g:2"],
        columns=["body", "topic"],
        startingOffsets=offsets,
        endingTimestamp=datetime(2026, 11, 16, 8, tzinfo=UTC),
        failOnDataLoss=False,
        readTimeout=500,
        tags=None,
    )
    assert found == SourceOptions.of(
        {
            "subscribe": "orders",
            "nameserver": "h:1;g:2",
            "columns": "body,topic",
            "startingOffsets": '{"orders": {"broker-a": {"0": 3, "1": -2}}}',
            "endingTimestamp": "2026-11-16T08:00:00+00:00",
            "failOnDataLoss": "false",
            "readTimeout": "500ms",
        },
        group_prefix="penstock-arrow",
    )
    assert options(assign={"orders": {"b": [1]}}).topics.assigned == {"orders": {"b": (1,)}}
    assert options(["a", "b"]).topics.names == options("a, b").topics.names == ("a", "b")
    assert options(mode="log", path=Path("store")).log_path == "store"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "no topic is named"),
        ({"topic": "a", "subscribe": "b"}, "the option subscribe names topics"),
        ({"topic": "a", "subscribePattern": "b.*"}, "contradict"),
        ({"topic": "a", "startingOffset": "earliest"}, "did you mean startingOffsets"),
        ({"topic": "a", "startingOffsets": "latest"}, "nothing would be read"),
        ({"topic": "a", "startingTimestamp": 1.5}, "is of type float"),
        ({"topic": "a", "path": "store"}, "is for mode=log only"),
        ({"topic": "a", "mode": "log"}, "needs the option path"),
        ({"topic": "a", "columns": ["body", "price"]}, "no column 'price'"),
        ({"topic": "a", "startingTimestamp": 2, "endingTimestamp": 1}, "is after"),
    ],
)
def test_wrong_options_are_refused_before_a_connection_is_made(
    given: dict[str, Any], message: str
) -> None:
    topic = given.pop("topic", None)
    with pytest.raises(BadSetting, match=message):
        penstock.arrow.read(topic, **given)


def run_without(module: str, code: str) -> str:
    """The output of a program in which this module can't be imported."""
    program = f"import sys; sys.modules[{module!r}] = None\n" + textwrap.dedent(code)
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, check=True)
    return done.stdout.strip()


@pytest.mark.slow
def test_reading_needs_no_spark() -> None:
    code = """
        from penstock.arrow import read
        try:
            read("orders", mode="log", path="no-such-directory")
        except Exception as error:
            print(error)
    """
    assert run_without("pyspark", code) == "path: no-such-directory does not exist"


def test_without_pyarrow_the_error_names_the_extra() -> None:
    code = """
        import penstock.arrow
        try:
            penstock.arrow.read("orders")
        except ModuleNotFoundError as error:
            print(error, error.name)
    """
    printed = run_without("pyarrow", code)
    assert "pip install '.[arrow]'" in printed
    assert printed.endswith(" pyarrow")


def test_unknown_names_of_the_package_are_refused() -> None:
    with pytest.raises(AttributeError, match="no attribute 'write'"):
        penstock.arrow.write  # noqa: B018
