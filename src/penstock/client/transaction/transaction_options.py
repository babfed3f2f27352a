"""Options of transaction producers."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.client.producer.producer_options import ProducerOptions
from penstock.client.transaction.transaction_checks import Check


@dataclass(frozen=True, kw_only=True)
class TransactionProducerOptions(ProducerOptions):
    """Options of `AsyncTransactionProducer` and `TransactionProducer`.

    `check` answers check-backs. Brokers of `topics` learn of the producer when it starts.
    """

    group: str = field()
    check: Check | None = None
    topics: Sequence[str] = ()
