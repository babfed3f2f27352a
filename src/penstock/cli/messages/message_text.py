"""Messages as text and as JSON. A message can't control the terminal: control characters are
escaped."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.plurals import count_text

if TYPE_CHECKING:
    from penstock.client.received_message import ReceivedMessage

BODY_FORMATS = ("auto", "text", "json", "msgpack", "hex", "none")
PREVIEW_CHARS = 60
_HEX_WIDTH = 16

_CONTROLS = {
    code: chr(code).encode("unicode_escape").decode()
    for code in (*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029)
    if chr(code) != "\t"
}
_LINE_CONTROLS = {code: text for code, text in _CONTROLS.items() if chr(code) != "\n"}


def one_line(text: str) -> str:
    """The text in one line, with control characters escaped."""
    return text.translate(_CONTROLS)


def lines(text: str) -> str:
    """The text with its line breaks, and all other control characters escaped."""
    return text.translate(_LINE_CONTROLS)


def message_json(message: "ReceivedMessage") -> dict[str, object]:
    """A message as JSON; a body that is not text is in `body_base64`."""
    from penstock.client.diagnosis.exported_message import exported_message

    return exported_message(message)


def stored_json(message: "ReceivedMessage") -> dict[str, object]:
    """A message as JSON, with the topic that it is stored in and the one that it was sent to."""
    from penstock.client.diagnosis.exported_message import exported_with_topics

    return exported_with_topics(message)


def body_text(body: bytes, form: str = "auto") -> str:
    """A body for people, in one of BODY_FORMATS; a hex dump if it does not have that format."""
    if form == "none":
        return ""
    if form in ("auto", "json"):
        try:
            return lines(json.dumps(json.loads(body), indent=2, ensure_ascii=False))
        except (ValueError, RecursionError):
            if form == "json":
                return lines(body.decode("utf-8", "backslashreplace"))
    if form == "text":
        return lines(body.decode("utf-8", "backslashreplace"))
    if form == "auto":
        try:
            return lines(body.decode())
        except UnicodeDecodeError:
            pass
    if form in ("auto", "msgpack"):
        from penstock.console.messages.decoders import decode_msgpack

        decoded = decode_msgpack(body)
        if decoded is not None:
            return lines(decoded)
    return hex_dump(body)


def hex_dump(body: bytes) -> str:
    """Offset, bytes in hexadecimal and as ASCII, 16 bytes a line."""
    rows = []
    for at in range(0, len(body), _HEX_WIDTH):
        chunk = body[at : at + _HEX_WIDTH]
        digits = chunk.hex(" ").ljust(_HEX_WIDTH * 3 - 1)
        shown = "".join(chr(byte) if 0x20 <= byte < 0x7F else "." for byte in chunk)
        rows.append(f"{at:08x}  {digits}  {shown}")
    return "\n".join(rows)


def preview(message: "ReceivedMessage") -> str:
    """The begin of the body in one line."""
    body = message.body[: 4 * PREVIEW_CHARS]
    text = one_line(body.decode("utf-8", "backslashreplace"))
    is_short = len(text) <= PREVIEW_CHARS and len(body) == len(message.body)
    return text if is_short else text[: PREVIEW_CHARS - 1] + "…"


def message_rows(messages: "Sequence[ReceivedMessage]") -> list[tuple[str, ...]]:
    """The rows of a table of messages, for MESSAGE_HEADS."""
    from penstock.cli.terminal import time_text

    return [
        tuple(
            one_line(cell)
            for cell in (
                time_text(message.store_ms),
                message.message_id,
                f"{message.queue.topic}/{message.broker_name}/{message.queue_id}"
                f"@{message.queue_offset}",
                message.tags or "-",
                " ".join(message.keys) or "-",
                preview(message),
            )
        )
        for message in messages
    ]


MESSAGE_HEADS = ("STORED", "ID", "PLACE", "TAG", "KEYS", "BODY")


def message_details(message: "ReceivedMessage", form: str) -> str:
    """A message for people: its fields, its properties, its body."""
    from penstock.cli.terminal import time_text
    from penstock.client.diagnosis import MessagePlace

    queue = message.queue
    fields = {
        "id": message.message_id,
        "offset id": message.offset_id,
        "topic": MessagePlace.of(message).origin or "-",
        "place": f"{queue.topic}/{queue.broker_name}/{queue.queue_id}@{message.queue_offset}",
        "stored": f"{time_text(message.store_ms)} by {message.store_host}",
        "born": f"{time_text(message.born_ms)} at {message.born_host}",
        "tag": message.tags or "-",
        "keys": " ".join(message.keys) or "-",
        "redeliveries": str(message.reconsume_times),
        "body": count_text(len(message.body), "byte"),
    }
    width = max(map(len, fields)) + 1
    rows = [f"{name + ':':<{width}} {one_line(value)}" for name, value in fields.items()]
    rows += ["", "properties:"]
    rows += [
        f"  {one_line(name)}={one_line(value)}"
        for name, value in sorted(message.properties.items())
    ]
    body = body_text(message.body, form)
    return "\n".join([*rows, "", body] if body else rows)
