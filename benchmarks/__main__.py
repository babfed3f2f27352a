"""Runs all benchmarks, or those that are named: `python -m benchmarks [NAME …]`.

`python -m benchmarks peers` compares with other brokers. It has options, and it is not one of all.
"""

import sys

import penstock
from benchmarks import (
    append_latency,
    arrow_read,
    clients,
    console,
    controller,
    failover,
    filters,
    growth,
    idle_memory,
    java_load,
    many_queues,
    many_topics,
    metrics_scrape,
    neighbour,
    pipelined,
    pop_path,
    pull_path,
    read_gather,
    replication,
    send_path,
    spark,
    spark_kafka,
    timers,
)
from benchmarks.peers import command as peers

ALL = {
    "send": send_path.main,
    "pull": pull_path.main,
    "pipelined": pipelined.main,
    "pop": pop_path.main,
    "gather": read_gather.main,
    "filters": filters.main,
    "latency": append_latency.main,
    "memory": idle_memory.main,
    "queues": many_queues.main,
    "topics": many_topics.main,
    "metrics": metrics_scrape.main,
    "growth": growth.main,
    "neighbour": neighbour.main,
    "java": java_load.main,
    "clients": clients.main,
    "console": console.main,
    "replication": replication.main,
    "controller": controller.main,
    "failover": failover.main,
    "timers": timers.main,
    "spark": spark.main,
    "spark_kafka": spark_kafka.main,
    "arrow": arrow_read.main,
}


def main() -> None:
    names = sys.argv[1:] or list(ALL)
    if names[0] == "peers":
        peers.main(names[1:])
        return
    print(f"core: {'compiled' if penstock.compiled() else 'NOT compiled'}")
    for name in names:
        ALL[name]()


if __name__ == "__main__":
    main()
