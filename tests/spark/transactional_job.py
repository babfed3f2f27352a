"""A stream from topic to topic with `delivery=transactional`, as a driver of its own to be killed.

python -m tests.spark.transactional_job NAMESERVERS SOURCE TARGET CHECKPOINT
"""

import sys

from penstock.spark.session import spark_session
from tests.spark.kit import SESSION_CONF


def main(nameservers: str, source: str, target: str, checkpoint: str) -> None:
    """Everything that is there, a few rows at a time; a line for each batch that ended."""
    spark = spark_session("transactional", master="local[2]", conf=SESSION_CONF)
    rows = spark.readStream.format("penstock").options(
        nameserver=nameservers, subscribe=source, startingOffsets="earliest",
        maxOffsetsPerTrigger="100",
    )  # fmt: skip
    query = (
        rows.load()
        .select("body")
        .writeStream.format("penstock")
        .options(nameserver=nameservers, topic=target, delivery="transactional")
        .option("checkpointLocation", checkpoint)
        .trigger(availableNow=True)
        .start()
    )
    print("begun", flush=True)
    query.awaitTermination()
    spark.stop()
    print("ended", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
