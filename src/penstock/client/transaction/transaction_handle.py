"""Handles of open transactions: small values that can be passed to another process."""

import base64
import binascii
import json
from dataclasses import astuple, dataclass
from enum import Enum
from typing import Final, Self

from penstock.errors import InvalidParameter
from penstock.transport.peer import split_address
from penstock.wire.codes import (
    SYS_TRANSACTION_COMMIT,
    SYS_TRANSACTION_NONE,
    SYS_TRANSACTION_ROLLBACK,
)

_PREFIX: Final = "tx1-"
_CHARS_MAX: Final = 4_096
_LONG_MAX: Final = 2**63 - 1


class Decision(Enum):
    """The decision about a half message."""

    COMMIT = SYS_TRANSACTION_COMMIT
    ROLLBACK = SYS_TRANSACTION_ROLLBACK
    UNKNOWN = SYS_TRANSACTION_NONE


@dataclass(frozen=True, slots=True)
class TransactionHandle:
    """Ends a transaction from any process: pass `str(handle)`, read it with `parse`.

    Topic and group include the namespace. The broker is found by its name; `address` is its address
    when the message was prepared.
    """

    topic: str
    group: str
    broker_name: str
    address: str
    queue_offset: int
    log_offset: int
    message_id: str
    transaction_id: str

    def __str__(self) -> str:
        data = json.dumps(astuple(self), separators=(",", ":"), ensure_ascii=False).encode()
        return _PREFIX + base64.urlsafe_b64encode(data).decode().rstrip("=")

    def end_fields(self, decision: Decision, *, from_check: bool) -> dict[str, str]:
        """The header fields of END_TRANSACTION."""
        fields = {
            "topic": self.topic,
            "producerGroup": self.group,
            "tranStateTableOffset": str(self.queue_offset),
            "commitLogOffset": str(self.log_offset),
            "commitOrRollback": str(decision.value),
            "fromTransactionCheck": "true" if from_check else "false",
            "msgId": self.message_id,
            "transactionId": self.transaction_id,
            "bname": self.broker_name,
        }
        return {name: text for name, text in fields.items() if text}

    @classmethod
    def parse(cls, text: str) -> Self:
        """The inverse of `str(handle)`; raises InvalidParameter."""
        if not text.startswith(_PREFIX) or len(text) > _CHARS_MAX:
            raise _bad(text)
        coded = text[len(_PREFIX) :]
        try:
            data = base64.b64decode(coded + "=" * (-len(coded) % 4), altchars=b"-_", validate=True)
            values = json.loads(data)
        except (binascii.Error, ValueError, RecursionError):
            raise _bad(text) from None
        if not isinstance(values, list) or len(values) != 8:
            raise _bad(text)
        for index, value in enumerate(values):
            if index in (4, 5):
                good = type(value) is int and 0 <= value <= _LONG_MAX
            else:
                good = isinstance(value, str) and _is_text(value)
            if not good:
                raise _bad(text)
        handle = cls(*values)
        if handle.address:
            try:
                split_address(handle.address)
            except ValueError:
                raise _bad(text) from None
        return handle


def _is_text(value: str) -> bool:
    """Whether it can be encoded as UTF-8: JSON can contain lone surrogates."""
    return not any("\ud800" <= character <= "\udfff" for character in value)


def _bad(text: str) -> InvalidParameter:
    return InvalidParameter(
        f"{text[:40]!r} is not a transaction handle",
        hint="give the unchanged result of str(handle)",
    )
