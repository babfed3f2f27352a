"""A send handler in plain Python, with which the compiled core is compared.

It does the same work for a binary send request: parse it, encode the record into a mapped file, add
the queue entry, and write the response.
"""

import mmap
import struct
import zlib

_HEAD = struct.Struct(">iihbhiii")
_RECORD = struct.Struct(">iiiiiqqiq")
_ENTRY = struct.Struct(">qiq")
_RESPONSE = struct.Struct(">hbhiiii")


class PlainHandler:
    """Handles send requests with a binary header."""

    def __init__(self, log: mmap.mmap, queues: list[mmap.mmap], store_host: bytes) -> None:
        self.log, self.queues, self.store_host = log, queues, store_host
        self.end = 0
        self.offsets = [0] * len(queues)

    def serve(self, data: bytes, born_host: bytes, now_ms: int) -> bytes:
        at, responses = 0, []
        while at < len(data):
            length = int.from_bytes(data[at : at + 4], "big")
            responses.append(self._handle(data[at + 4 : at + 4 + length], born_host, now_ms))
            at += 4 + length
        return b"".join(responses)

    def _handle(self, frame: bytes, born_host: bytes, now_ms: int) -> bytes:
        header_length = int.from_bytes(frame[:4], "big") & 0xFFFFFF
        _code, _language, _version, opaque, _flag, remark = struct.unpack_from(">hbhiii", frame, 4)
        at = 4 + 17 + remark
        end = at + 4 + int.from_bytes(frame[at : at + 4], "big")
        at += 4
        ext = {}
        while at < end:
            n = int.from_bytes(frame[at : at + 2], "big")
            key = frame[at + 2 : at + 2 + n].decode()
            at += 2 + n
            n = int.from_bytes(frame[at : at + 4], "big")
            ext[key] = frame[at + 4 : at + 4 + n].decode()
            at += 4 + n
        return self._store(ext, frame[4 + header_length :], opaque, born_host, now_ms)

    def _store(
        self, ext: dict[str, str], body: bytes, opaque: int, born_host: bytes, now_ms: int
    ) -> bytes:
        topic, queue_id = ext["b"].encode(), int(ext["e"])
        properties = dict(p.split("\x01", 1) for p in ext["i"].split("\x02") if p)
        tag = 0
        for unit in properties.get("TAGS", ""):
            tag = (31 * tag + ord(unit)) & 0xFFFFFFFF
        properties.update(MSG_REGION="DefaultRegion", TRACE_ON="true", CLUSTER="DefaultCluster")
        text = "".join(f"{k}\x01{v}\x02" for k, v in properties.items()).encode()
        size = 91 + len(body) + len(topic) + len(text)
        queue_offset, offset = self.offsets[queue_id], self.end
        self.log[offset : offset + size] = b"".join((
            _RECORD.pack(size, -626843481, zlib.crc32(body) & 0x7FFFFFFF, queue_id, int(ext["h"]),
                         queue_offset, offset, int(ext["f"]), int(ext["g"])),
            born_host, struct.pack(">q", now_ms), self.store_host,
            struct.pack(">iqi", int(ext["j"]), 0, len(body)), body,
            bytes((len(topic),)), topic, struct.pack(">h", len(text)), text,
        ))  # fmt: skip
        self.end += size
        _ENTRY.pack_into(self.queues[queue_id], queue_offset * 20, offset, size, tag)
        self.offsets[queue_id] += 1
        fields = {
            "msgId": (self.store_host + struct.pack(">q", offset)).hex().upper(),
            "queueId": str(queue_id),
            "queueOffset": str(queue_offset),
        }
        ext_bytes = b"".join(
            struct.pack(">h", len(k)) + k.encode() + struct.pack(">i", len(v)) + v.encode()
            for k, v in fields.items()
        )
        header = _RESPONSE.pack(0, 3, 493, opaque, 1, 0, len(ext_bytes)) + ext_bytes
        return struct.pack(">ii", 4 + len(header), 1 << 24 | len(header)) + header
