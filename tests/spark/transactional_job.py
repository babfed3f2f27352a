"""A stream from topic to topic with `delivery=transactional`, as a driver of its own to be killed.

python -m tests.spark.transactional_job NAMESERVERS SOURCE TARGET CHECKPOINT STEPS BATCH STEP
"""

import os
import sys

from penstock.spark.session import spark_session
from tests.spark.killing import KillingSource
from tests.spark.kit import SESSION_CONF

BATCH_ROWS = 6


def main(
    nameservers: str, source: str, target: str, checkpoint: str, steps: str, batch: str, step: str
) -> None:
    """Process all messages, a few rows per batch; killed at this step of that batch."""
    spark = spark_session("transactional", master="local[2]", conf=SESSION_CONF)
    spark.dataSource.register(KillingSource)
    rows = spark.readStream.format("penstock").options(
        nameserver=nameservers, subscribe=source, startingOffsets="earliest",
        maxOffsetsPerTrigger=str(BATCH_ROWS), minPartitions="2",
    )  # fmt: skip
    query = (
        rows.load()
        .select("body")
        .writeStream.format("killing")
        .options(nameserver=nameservers, topic=target, delivery="transactional")
        .options(driver=str(os.getpgrp()), steps=steps, killBatch=batch, killStep=step)
        .option("checkpointLocation", checkpoint)
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
