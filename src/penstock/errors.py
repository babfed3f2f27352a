"""The one error tree. Ground floor: imports nothing of ours.

Every class says three things, so that nobody has to match on text:

- `code`   the response code a peer gets (`wire.codes.ResponseCode`, as plain numbers here);
- `retry`  whether the same request may succeed later, or on another broker;
- `hint`   the next step for the person who reads the message.

A refusal because of a limit is built with `over`: it names the figure, the limit and the setting.
"""
# A name says what happened (DiskFull), its family says that it is an error:
# ruff: noqa: N818

from typing import ClassVar, Self


class PenstockError(Exception):
    """Anything that goes wrong in Penstock and that we know by name."""

    code: ClassVar[int] = 1  # SYSTEM_ERROR
    retry: ClassVar[bool] = False
    hint: str = ""

    figure: int | None = None
    limit: int | None = None
    setting: str | None = None

    def __init__(self, message: str = "", *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        if hint is not None:
            self.hint = hint

    @classmethod
    def over(
        cls,
        what: str,
        *,
        figure: int,
        limit: int,
        unit: str = "bytes",
        setting: str | None = None,
        hint: str | None = None,
    ) -> Self:
        """A refusal because `figure` exceeds `limit`, with both and the setting in the message."""
        name = f" ({setting})" if setting else ""
        error = cls(f"{what}: {figure} {unit}, the limit is {limit}{name}", hint=hint)
        error.figure, error.limit, error.setting = figure, limit, setting
        return error

    def remark(self) -> str:
        """What a peer or a terminal is told: the message and the next step."""
        message = self.message or type(self).__name__
        return f"{message}; {self.hint}" if self.hint else message


# --- bytes from a peer ---------------------------------------------------------------------------


class WireError(PenstockError):
    """Bytes from a peer that do not follow the protocol."""

    hint = "check that the peer speaks RocketMQ's remoting protocol"


class FrameError(WireError):
    """The byte stream has lost its frames: the connection can only be closed."""

    hint = "the connection is closed; check that the peer speaks RocketMQ's remoting protocol"


class HeaderError(WireError):
    """A frame whose header, or a field of it, can't be read."""

    code = 29  # INVALID_PARAMETER: final for clients, where SYSTEM_ERROR would be tried again
    hint = "check the fields that the client sends with this request"


class RecordError(WireError):
    """A message, or a batch of messages, whose bytes do not add up."""

    code = 13  # MESSAGE_ILLEGAL
    hint = "check the client that encoded the message"


class BodyError(WireError):
    """A body or a file of JSON that can't be read as what it should be."""

    code = 29  # INVALID_PARAMETER
    hint = "check the body that the client sends with this request"


class CompressionError(WireError):
    """A compressed body that can't be restored, or only beyond the limit."""

    code = 13  # MESSAGE_ILLEGAL
    hint = "check the compression type of the producer"


# --- files ---------------------------------------------------------------------------------------


class StoreError(PenstockError):
    """The store can't do what was asked."""


class StoreRefused(StoreError):
    """A store that we do not read: the message names what it holds."""

    code = 14  # SERVICE_NOT_AVAILABLE
    hint = "open it with Apache RocketMQ, or copy its topics over by replication or by consuming"


class StoreLocked(StoreError):
    """Another process has this store open."""

    code = 14  # SERVICE_NOT_AVAILABLE
    hint = "stop the other broker, or give this one a store directory of its own"


class StoreDamaged(StoreError):
    """Stored bytes that contradict themselves where recovery may not cut."""

    hint = "keep a copy of the store before anything else, then restore from a replica"


class ReadFailed(StoreError):
    """The disk did not give back what was written to it."""

    retry = True
    hint = "check the disk and the kernel log"


class NotWriteable(StoreError):
    """The store takes no messages now: a replica, shutting down, or set read-only."""

    code = 14  # SERVICE_NOT_AVAILABLE
    retry = True
    hint = "send to the master of this broker name"


class WriteStopped(NotWriteable):
    """An fsync failed, so nothing can be promised any more: writing has stopped for good."""

    hint = "check the disk and the kernel log, then restart the broker; it recovers what is durable"


class DiskFull(NotWriteable):
    """No space could be allocated for what should be written."""

    hint = "free space on the disk; writes resume by themselves"


class DiskNearlyFull(NotWriteable):
    """The disk is used above the mark from which writes are refused."""

    hint = "free space or lower the retention; writes resume by themselves below the low mark"


class MessageIllegal(StoreError):
    """A message beyond a limit of the store, or one it can't represent."""

    code = 13  # MESSAGE_ILLEGAL
    hint = "make the message smaller, or raise the setting on the broker and in the client"
