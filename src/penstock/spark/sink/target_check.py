"""Checks, before the first row is sent, that there is a cluster and that it has the topic.

A wrong address and a misspelt topic are found here at once. Later, a broker or a NameServer that
does not answer is waited for, because it has answered before.
"""

from penstock.arrow.cluster_metadata import ClusterMetadata
from penstock.errors import NoRoute
from penstock.spark.sink.sink_options import SinkOptions


def check_target(options: SinkOptions) -> None:
    """Raise NoRoute for a topic that does not exist, unless the write may create it, and
    NoNameServer if none answers for some seconds; waits for a broker."""
    topic = None if options.create_topics else options.topic
    with ClusterMetadata(options.connection, timeout_ms=options.delivery_timeout_ms) as cluster:
        try:
            cluster.check_topic(topic)
        except NoRoute as error:
            hint = f"{error.hint}; createTopics=true lets the write create it"
            raise NoRoute(error.message, hint=hint) from None
