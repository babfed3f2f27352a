"""docs/spark.md: its examples run, and it names every option and column."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from penstock import Message
from penstock.arrow.connection_options import CONNECTION_OPTIONS
from penstock.arrow.message_schema import FIELDS
from penstock.arrow.source_options import SOURCE_OPTIONS
from penstock.spark.sink.row_messages import COLUMN_TYPES as WRITTEN_COLUMNS
from penstock.spark.sink.sink_options import SINK_OPTIONS
from tests.spark import kit

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.compat.penstock import Up

PAGE = (Path(__file__).parents[2] / "docs" / "spark.md").read_text()


@pytest.mark.parametrize(
    "name", sorted({*CONNECTION_OPTIONS, *SOURCE_OPTIONS, *SINK_OPTIONS, *FIELDS, *WRITTEN_COLUMNS})
)
def test_the_page_names_every_option_and_column(name: str) -> None:
    assert f"`{name}`" in PAGE


@pytest.mark.spark
@pytest.mark.slow
def test_the_examples_run(
    spark: SparkSession, cluster: Up, tmp_path: Path, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """In one namespace, in the order of the page, against a topic with three orders."""
    kit.create_topic(cluster, "orders")
    kit.send(cluster, [Message("orders", f'{{"id": {n}}}', tag) for n, tag in enumerate("abb")])
    store = next(path.parent for path in cluster.log.parent.rglob("commitlog"))
    places = {
        "localhost:9876": cluster.address,
        "penstock-data/broker-a": str(store),
        "checkpoints/": f"{tmp_path}/",  # the JVM's directory is not the one of this test
    }
    names: dict[str, object] = {}
    for block in re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE):
        for shown, here in places.items():
            block = block.replace(shown, here)
        exec(compile(block, "docs/spark.md", "exec"), names)
    printed = capsys.readouterr().out
    assert printed.count('{"id": ') == 3
    assert re.search(r"\|\s*b\|\s*2\|", printed)
    assert len(kit.read_topic(cluster, "orders", 5)) == 5
