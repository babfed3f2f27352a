"""JSON as fastjson 1.2 reads and writes it.

Reading. msgspec decodes strict JSON straight into its type; whatever it refuses is read again by a
tolerant parser, which takes about 25 times as long and therefore has its own size limit:

    {0:"a", -1:"b"}              numbers as keys
    {{"queueId":0}:7}            objects as keys, also as a string that holds the object
    {'a':1, b:2}                 single quotes, bare identifiers
    {,"a":1,,}  [1,,2]           stray commas
    {"a":null}                   a null member counts as absent, so that its default holds
    01 +1 1. 1L 1D NaN           numbers of Java; NaN and undefined are null

References (`{"$ref":…}`, written when one Java object occurs twice) are refused with an error that
names them. Every error is a `BodyError`.

Writing. Members sorted by name, None omitted, bytes as base64, sets sorted. Three forms:

    encode         compact, numbers and objects as bare keys: for bodies
    encode_pretty  the same with tabs and lines: for files
    encode_strict  all keys quoted, non-ASCII escaped: routes for clients from 4.9.4 on
"""

from penstock.wire.fastjson.decoder import BYTES_MAX, build, decode
from penstock.wire.fastjson.tolerant_reader import DEPTH_MAX, LOOSE_BYTES_MAX, ObjectKey, read
from penstock.wire.fastjson.writer import RawJson, encode, encode_pretty, encode_strict

__all__ = [
    "BYTES_MAX",
    "DEPTH_MAX",
    "LOOSE_BYTES_MAX",
    "ObjectKey",
    "RawJson",
    "build",
    "decode",
    "encode",
    "encode_pretty",
    "encode_strict",
    "read",
]
