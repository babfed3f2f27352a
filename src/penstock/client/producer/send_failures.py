"""Failures of sends: which ones are retried, and the error after the last attempt."""

import asyncio
from collections import Counter
from collections.abc import Sequence

from penstock.client.messages import SendReceipt
from penstock.client.producer.outgoing import MessageBatch
from penstock.client.producer.send_codec import PendingSend, SendResult, SendTarget
from penstock.errors import PeerError, PenstockError, SendFailed
from penstock.wire.codes import RETRYABLE_RESPONSES, ResponseCode


async def outcomes(
    batches: Sequence[MessageBatch], futures: Sequence["asyncio.Future[SendResult]"], count: int
) -> list[SendReceipt | PenstockError]:
    """The receipt or error of each message, in the order of the caller's list."""
    found: dict[int, SendReceipt | PenstockError] = {}
    for batch, future in zip(batches, futures, strict=True):
        receipts: Sequence[SendReceipt | PenstockError]
        try:
            result = await future
            receipts = result if isinstance(result, list) else [result]
        except PenstockError as error:
            receipts = [error] * len(batch.indexes)
        found.update(zip(batch.indexes, receipts, strict=True))
    return [found[index] for index in range(count)]


def is_retryable(error: PenstockError) -> bool:
    """Whether another broker, or the same one later, may accept the message."""
    return isinstance(error, PeerError) or error.answer_code in RETRYABLE_RESPONSES


def is_denied(pending: PendingSend, target: SendTarget) -> bool:
    """Whether the target's broker has answered NO_PERMISSION: the next answer is the same."""
    return pending.failures is not None and any(
        error.answer_code == ResponseCode.NO_PERMISSION
        and target.peer is not None
        and error.address == target.peer.address
        for error in pending.failures
    )


def send_failure(pending: PendingSend, monotonic_ms: int) -> SendFailed:
    """The error after the last attempt."""
    attempts = tuple(pending.failures or ())
    denied = all(error.answer_code == ResponseCode.NO_PERMISSION for error in attempts)
    took_ms = monotonic_ms - pending.deadline_ms + pending.timeout_ms
    counts = Counter(error.message for error in attempts)
    causes = "; ".join(
        cause if count == 1 else f"{cause} ({count} times)" for cause, count in counts.items()
    )
    count = "1 attempt" if len(attempts) == 1 else f"{len(attempts)} attempts"
    failure = SendFailed(
        f"no acknowledgement from topic {pending.topic} after {count} in {took_ms} ms: {causes}",
        attempts=attempts,
        hint=attempts[-1].hint if denied else None,  # nothing was stored
    )
    failure.__cause__ = attempts[-1]
    return failure
