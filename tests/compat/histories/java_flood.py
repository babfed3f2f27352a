"""A stock Java producer as a client of a history: one thread per queue."""

from __future__ import annotations

import uuid

from tests.compat.histories.clients import QUEUES, ROUTES_MS, SEND_MS, Clock, queue_name
from tests.compat.histories.cluster import Cluster
from tests.compat.histories.history import Send
from tests.compat.java_session import JavaSession

JAVA_TOPIC = "java"
ANY_ATTEMPTS = 1_000_000
"""It sends a number until it is acknowledged."""
PAUSE_MS = 5


class JavaFlood:
    """Sends 0, 1, 2 … to each queue of a topic of its own (see Flood.java)."""

    def __init__(self, java: JavaSession, cluster: Cluster, clock: Clock) -> None:
        self._java = java
        self._nameserver = cluster.nameserver
        self._name = f"java-{uuid.uuid4().hex[:8]}"
        self._clock = clock

    def start(self) -> None:
        name = self._name
        self._java.do("producer.start", producer=name, namesrv=self._nameserver,
                      poll_namesrv_ms=ROUTES_MS, timeout_ms=SEND_MS)  # fmt: skip
        self._java.do("flood.start", producer=name, flood=name, topic=JAVA_TOPIC, pause_ms=PAUSE_MS)

    def stop(self) -> list[Send]:
        """Stop it; returns its sends in their order."""
        told = self._java.do("flood.stop", flood=self._name)
        self._java.do("producer.stop", producer=self._name)
        sends, numbers = [], dict.fromkeys(range(QUEUES), 0)
        for _, queue, number, offset in told["acknowledged"]:
            sends.append(
                Send(
                    producer=f"{self._name}-{queue}",
                    queue=queue_name(JAVA_TOPIC, queue),
                    body=str(number),
                    outcome="acknowledged",
                    offset=offset,
                    attempts_max=ANY_ATTEMPTS,
                    end=self._clock(),
                )
            )
            numbers[queue] = number + 1
        # The last number of each queue may be stored although it was not acknowledged.
        return sends + [
            Send(
                producer=f"{self._name}-{queue}",
                queue=queue_name(JAVA_TOPIC, queue),
                body=str(number),
                outcome="unknown",
                attempts_max=ANY_ATTEMPTS,
            )
            for queue, number in numbers.items()
        ]
