"""Answers that promise something: under sync flush they leave when the log is on the disk."""

from penstock.rpc.answers import Answer, Encoded, Reply
from penstock.rpc.command import Command
from penstock.store.store import MessageStore
from penstock.wire.codes import ResponseCode
from penstock.wire.output import response


def promise(store: MessageStore, command: Command, reply: Reply, done: str = "stored") -> Answer:
    """A reply without a body, to a request whose effect lies in the log up to its end now.

    `done` says what has been done if it takes too long to reach the disk.
    """
    if command.oneway or not store.flusher.group_commit:
        return reply
    late = response(
        ResponseCode.FLUSH_DISK_TIMEOUT,
        command.opaque,
        command.encoding,
        ext=reply.ext,
        remark=f"{done}, but not on the disk within flush_timeout_ms",
    )
    data = response(0, command.opaque, command.encoding, ext=reply.ext, remark=reply.remark)
    return Encoded(data, late, store.log.end)
