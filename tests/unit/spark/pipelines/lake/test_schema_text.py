"""The text of a schema is checked before Spark is started."""

import pytest

from penstock.errors import BadSetting
from penstock.spark.pipelines.lake.lake_pipeline import PIPELINE
from penstock.spark.pipelines.lake.schema_text import check_schema_text


@pytest.mark.parametrize(
    "ddl",
    [
        "id STRING NOT NULL, amount DOUBLE, items ARRAY<STRING>",
        "id: bigint, `an odd, name` DECIMAL(10, 2) COMMENT 'in €, with VAT', m MAP<STRING, INT>",
        "s STRUCT<a: INT, b: STRUCT<c: VARCHAR(3)>>, t TIMESTAMP_NTZ",
    ],
)
def test_valid_schemas_are_accepted(ddl: str) -> None:
    check_schema_text(ddl, taken=("topic", "keys"))


@pytest.mark.parametrize(
    ("ddl", "message"),
    [
        ("id STR", "there is no type 'STR'"),
        ("id", "'id' is not a name and a type"),
        ("id STRING,", "'' is not a name and a type"),
        ("a ARRAY<STRING, b INT", "brackets or quotes do not match"),
        ("keys STRING", "names keys, which are columns of messages"),
        ("a INT, A STRING", "names a column twice"),
    ],
)
def test_wrong_schemas_are_refused(ddl: str, message: str) -> None:
    with pytest.raises(BadSetting, match=message):
        check_schema_text(ddl, taken=("topic", "keys"))


def test_prefix_keeps_names_apart() -> None:
    check_schema_text("keys STRING", prefix="body_", taken=("keys",))


def test_lake_refuses_a_wrong_schema_before_servers_are_asked() -> None:
    with pytest.raises(BadSetting, match="there is no type 'STR'"):
        PIPELINE.job(
            {"topics": "orders", "lake": "lake", "schema": "id STR"},
            connection={"nameserver": "127.0.0.1:1"},
        )
